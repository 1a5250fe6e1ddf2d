"""Writes the request log: JSON Lines in the workload format, so that real traffic can be replayed.

Each line has ``arrival_s, adapter, input_tokens, output_tokens, tenant, priority, slo`` and the outcome of the request.
TTFT is the sum of ``queue_s`` (until it had its blocks), ``adapter_wait_s``, ``kv_wait_s`` and prefill (ELORA spec,
R28). ``arrival_s`` counts from the arrival of the file's first line, also across restarts. ``arrival_s`` is negative
for a request that arrived before the first line's request and ended after it. ``unix_s`` is the wall time. Lines are in
the order in which requests ended. A thread writes the lines, so that a slow disk does not delay streams. Lines that do
not fit into the thread's queue are dropped and counted.
"""

import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.http.logs import log
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.json_lines import drop_partial_line
from lorikeet.observe.waits import decision_json, waits_json

_MAX_QUEUED = 10_000
"""Most lines in the queue; with ``text`` one may take megabytes."""


class RequestLog:
    """Writes and rotates one log file.

    Args:
        path: the log file. Rotated files are ``path.1`` (the newest), ``path.2``, …
        max_bytes: size beyond which the file is rotated.
        keep: number of rotated files to keep.
        text: whether lines include the prompt's token ids and the answer's text.

    Attributes:
        dropped: number of lines lost because the queue was full.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int, keep: int, text: bool = False) -> None:
        self.wants_text = text
        self.dropped = 0
        self._path = path
        self._max_bytes = self._full_at_bytes = max_bytes
        self._keep = keep
        self._wall_minus_monotonic_s = time.time() - time.monotonic()
        drop_partial_line(path)
        self._first_arrival_s = _first_arrival_unix_s(path)
        self._file = path.open("ab")
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def on_ended(self, ended: EndedRequest) -> None:
        """Queue the line of a request."""
        request = ended.request
        timings = ended.timings
        line: dict[str, Any] = {
            "unix_s": round(timings.arrival_s + self._wall_minus_monotonic_s, 6),
            "adapter": ended.adapter,
            "input_tokens": ended.prompt_tokens,
            "output_tokens": ended.completion_tokens,
            "tenant": request.tenant or None,
            "priority": request.priority,
            "slo": request.slo,
            "request_id": request.request_id,
            "adapter_digest": request.digest,
            "system_fingerprint": ended.fingerprint,
            **waits_json(timings),
            "e2e_s": round(ended.e2e_s, 6),
            "finish_reason": ended.reason,
            "decisions": [decision_json(each, timings.arrival_s) for each in timings.decisions],
        }
        if request.images:
            line["images"] = len(request.images)
        if self.wants_text:
            line |= {"prompt_token_ids": request.prompt_token_ids, "text": ended.text or ""}
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            # The error is logged at 1, 2, 4, 8, … lost lines: immediately, but not often.
            if self.dropped.bit_count() == 1:
                log.error("the request log's disk is too slow", file=str(self._path), lines_dropped=self.dropped)

    def close(self) -> None:
        """Write all queued lines and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(line)
                if self._queue.empty():
                    self._file.flush()
            except Exception as error:  # The thread must continue: the next line may be written.
                log.error("the request log cannot be written", file=str(self._path), error=str(error))

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.tell() >= self._full_at_bytes:
            self._rotate()
        if self._first_arrival_s is None:
            self._first_arrival_s = line["unix_s"]
        arrival_s = round(line["unix_s"] - self._first_arrival_s, 6)
        self._file.write(msgspec.json.encode({"arrival_s": arrival_s, **line}) + b"\n")

    def _rotate(self) -> None:
        """Start a new file. If that fails, keep the old file until it has grown by ``max_bytes`` again."""
        try:
            for number in range(self._keep, 0, -1):
                source = self._numbered(number - 1)
                if source.exists():
                    os.replace(source, self._numbered(number))
            new = self._path.open("wb")
        except OSError as error:
            self._full_at_bytes = self._file.tell() + self._max_bytes
            log.error("the request log cannot be rotated", file=str(self._path), error=str(error))
            return
        old = self._file
        self._file = new
        self._full_at_bytes = self._max_bytes
        self._first_arrival_s = None
        old.close()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def _first_arrival_unix_s(path: Path) -> float | None:
    """Return the wall time from which ``arrival_s`` counts in an existing file; None for a new one."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = msgspec.json.decode(first, type=dict[str, Any])
        return float(line["unix_s"]) - float(line["arrival_s"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
