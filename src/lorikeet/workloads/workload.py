"""Reads and writes workloads as JSON Lines, one request per line. Also reads Azure's CSV and Mooncake's JSON Lines."""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from lorikeet.core import request
from lorikeet.core.request import Slo


class OptionError(ValueError):
    """An option is invalid, or invalid for this number of requests."""


class Range(NamedTuple):
    """Draws integers from ``low`` to ``high``, both included, with equal probability."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Parse ``128`` or ``64-256``.

        Raises:
            OptionError: it is neither.
        """
        low, dash, high = text.partition("-")
        try:
            found = cls(int(low), int(high if dash else low))
        except ValueError:
            found = cls(1, 0)
        if not 0 <= found.low <= found.high:
            raise OptionError(f"{text!r} is neither a number nor a range such as 64-256")
        return found

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Return ``count`` random integers."""
        return generator.integers(self.low, self.high, count, endpoint=True).tolist()


def parse_slo(text: str) -> Slo:
    """Parse limits; see ``request.parse_slo``.

    Raises:
        OptionError: the limits cannot be parsed.
    """
    try:
        return request.parse_slo(text)
    except request.SloError as error:
        raise OptionError(str(error)) from None


MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one prefix block in Mooncake's traces, and the default of workloads."""

MADE_BLOCK_TOKENS = 32
"""Tokens of one prefix block of generated requests."""


class WorkloadError(ValueError):
    """A line cannot be read. The message names the file and the line."""


class WorkloadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes one request of a workload.

    Attributes:
        arrival_s: seconds since the start of the workload.
        adapter: name of the adapter; None for the base model.
        input_tokens, output_tokens: lengths.
        prefix_blocks: ids of the leading blocks of the prompt; equal ids have equal content.
        conversation: id that the requests of one conversation share.
        tenant: owner of the request.
        priority: priority of the request. Lower values run earlier.
        slo: limits to meet.
        prefix_block_tokens: length of each prefix block, equal in the whole workload; 0 if unknown.
    """

    arrival_s: float
    adapter: str | None
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    conversation: str | None = None
    tenant: str | None = None
    priority: int = 0
    slo: Slo | None = None
    prefix_block_tokens: int = 0


T = TypeVar("T")


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Read a workload of JSON Lines, in the order of the file.

    A request log counts arrivals from the arrival of the first request that ended. Other requests may have arrived
    earlier, at negative times. In that case all times are shifted, so that the first arrival is at 0.

    Raises:
        WorkloadError: a line is not a request.
    """
    requests = list(_decode_lines(path, WorkloadRequest))
    first_s = min((request.arrival_s for request in requests), default=0.0)
    if first_s >= 0:
        return requests
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def write_workload(path: Path, requests: Iterable[WorkloadRequest]) -> None:
    """Write ``requests`` as JSON Lines."""
    with path.open("wb") as file:
        for request in requests:
            file.write(msgspec.json.encode(request) + b"\n")


def read_azure(path: Path) -> list[WorkloadRequest]:
    """Read a CSV of Azure's 2023 trace (``TIMESTAMP,ContextTokens,GeneratedTokens``); arrivals count from the first.

    Raises:
        WorkloadError: a column is missing or a value is invalid.
    """
    requests: list[WorkloadRequest] = []
    start: datetime | None = None
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # The trace has seven digits below the second, but datetime reads only six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, ValueError, TypeError) as error:
                raise WorkloadError(f"{path}, line {number}: {error!r}") from error
            start = start or at
            requests.append(WorkloadRequest((at - start).total_seconds(), None, *lengths))
    return requests


def read_mooncake(path: Path) -> list[WorkloadRequest]:
    """Read a JSON Lines trace of Mooncake; ``prefix_blocks`` are its ``hash_ids``, of 512 tokens each.

    Raises:
        WorkloadError: a line is not a request of that trace.
    """
    return [
        WorkloadRequest(
            line.timestamp / 1000,
            None,
            line.input_length,
            line.output_length,
            line.hash_ids,
            prefix_block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
        for line in _decode_lines(path, _MooncakeLine)
    ]


def read_any(path: Path) -> list[WorkloadRequest]:
    """Read a workload or one of the two traces: ``.csv`` is Azure's, lines with ``hash_ids`` are Mooncake's.

    Raises:
        WorkloadError: the file has none of these formats.
    """
    if path.suffix == ".csv":
        return read_azure(path)
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return read_mooncake(path) if b'"hash_ids"' in first else read_workload(path)


def block_tokens_of(requests: Iterable[WorkloadRequest], given: int = 0) -> int:
    """Return the length of a prefix block: ``given``, otherwise the length in the requests, otherwise 512.

    Raises:
        WorkloadError: the requests have different lengths.
    """
    if given:
        return given
    lengths = {request.prefix_block_tokens for request in requests if request.prefix_blocks}
    if len(lengths) > 1:
        raise WorkloadError(
            f"prefix_block_tokens: a workload must have one length of prefix blocks, not {sorted(lengths)}"
        )
    return next(iter(lengths), 0) or MOONCAKE_BLOCK_TOKENS


def _decode_lines(path: Path, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
