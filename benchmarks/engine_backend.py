"""Lorikeet's engine as a backend of the offline benchmark."""

import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.offline_backends import OfflineBatch, OfflineResult
from lorikeet import __version__
from lorikeet.adapters.store import reference
from lorikeet.config import Settings
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.driver import wait_for_work


class LorikeetBackend:
    """The engine in this process, built as for the server."""

    name = "lorikeet"

    def __init__(self, settings: Settings, folders: Sequence[Path]) -> None:
        self._engine, sizes, *_ = build_replica(settings)
        self._refs = [reference(folder.name, folder, sizes.geometry) for folder in folders]
        self._clock = MonotonicClock()
        self._submitted = 0
        self.versions = {"lorikeet": __version__, "torch": version("torch")}

    def run(self, work: OfflineBatch) -> OfflineResult:
        """Run one batch with greedy sampling."""
        start_s = self._clock.now()
        tokens: dict[RequestId, list[int]] = {}
        sampling = SamplingParams(max_tokens=work.output_tokens, temperature=0.0)
        for prompt, adapter in zip(work.prompts, work.adapters, strict=True):
            request_id = RequestId(f"offline-{self._submitted}")
            self._submitted += 1
            tokens[request_id] = []
            ref = None if adapter is None else self._refs[adapter]
            self._engine.submit(Request(request_id, prompt, sampling, start_s, ref))
        waiting = set(tokens)
        decode_start_s = start_s
        decoded = 0
        while self._engine.has_requests:
            outputs = self._engine.step().tokens
            for output in outputs:
                decoded += len(output.tokens)
                tokens[output.request_id] += [token.token_id for token in output.tokens]
            if waiting and outputs:
                waiting.difference_update(output.request_id for output in outputs)
                decode_start_s = self._clock.now()
                decoded = 0
            if not self._engine.is_busy:
                wait_for_work(self._engine, self._clock, math.inf)
        end_s = self._clock.now()
        decode_tok_s = decoded / (end_s - decode_start_s) if decoded else None
        return OfflineResult(end_s - start_s, list(tokens.values()), decode_tok_s)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
