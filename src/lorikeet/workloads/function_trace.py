"""Derives the popularity and arrivals of adapters from cloud functions, as in several papers.

Azure's trace of 2019 (https://github.com/Azure/AzurePublicDataset, AzureFunctionsDataset2019.md, CC-BY 4.0) counts the
calls of each function per minute: ``read_function_trace``. Without the file, ``popularity`` computes shares from the
figures that Shahrad and others printed ("Serverless in the Wild", USENIX ATC 2020, section 3.3): calls per day span 8
orders of magnitude, 45 % of applications are called once an hour or less, 81 % once a minute or less, and the 18.6 % of
applications that are called more often have 99.6 % of all calls.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from lorikeet.workloads.workload import OptionError, WorkloadError

FUNCTIONS = 40_000
"""Number of functions from which the most popular are taken. TOPPINGS (section 7.4) mentions about this number."""

_HOURLY = 0.45
_MINUTELY = 0.81
"""Shares of applications called at most once an hour, and at most once a minute."""

_ID_COLUMNS = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MINUTE_S = 60.0


def log_normal_of_rates() -> tuple[float, float]:
    """Return (μ, σ) of the log-normal distribution of calls per minute that matches both printed shares.

    They are −3.58 and 4.08. The distribution gives for the other printed figures: applications above one call a minute
    have 99.93 % of all calls (printed: 99.6 %), and the middle 97.6 % of them span 8 orders of magnitude.
    """
    normal = NormalDist()
    sigma = math.log(60) / (normal.inv_cdf(_MINUTELY) - normal.inv_cdf(_HOURLY))
    return -normal.inv_cdf(_MINUTELY) * sigma, sigma


def popularity(count: int, functions: int = FUNCTIONS, chunk: int | None = None) -> np.ndarray:
    """Return the share of requests of each of ``count`` adapters, most popular function first.

    The functions' rates are the middles of ``functions`` equally likely parts of the log-normal distribution.

    Args:
        count: number of adapters.
        functions: functions of the trace.
        chunk: None maps the ``count`` most popular functions to one adapter each (ELORA, section III-B). A number maps
            all functions in turn, ``chunk`` at a time: the f-th to adapter ⌊f / chunk⌋ mod ``count`` (dLoRA, section
            7.1, which uses the name skewness).

    Raises:
        OptionError: fewer functions than adapters, or a chunk that is not positive.
    """
    if functions < count:
        raise OptionError(f"{functions} functions are fewer than {count} adapters")
    _, sigma = log_normal_of_rates()
    normal = NormalDist()
    taken = count if chunk is None else functions
    ranks = (normal.inv_cdf(1 - (f + 0.5) / functions) for f in range(taken))
    weights = np.exp(sigma * np.fromiter(ranks, np.float64, taken))
    shares = map_functions(weights[:, None], count, chunk)[:, 0]
    return shares / shares.sum()


def map_functions(calls: np.ndarray, count: int, chunk: int | None = None) -> np.ndarray:
    """Return the calls of ``count`` adapters, shape (count, minutes), from the calls of functions.

    Args:
        calls: calls of functions, shape (functions, minutes). Functions are sorted by their sum, most calls first, with
            ties in their order.
        count: number of adapters.
        chunk: see ``popularity``.

    Raises:
        OptionError: fewer functions than adapters, or a chunk that is not positive.
    """
    if chunk is not None and chunk < 1:
        raise OptionError(f"a chunk of {chunk} functions is not positive")
    if len(calls) < count:
        raise OptionError(f"{len(calls)} functions are fewer than {count} adapters")
    order = np.argsort(-calls.sum(axis=1), kind="stable")
    if chunk is None:
        return calls[order[:count]]
    mapped = np.zeros((count, calls.shape[1]), calls.dtype)
    np.add.at(mapped, np.arange(len(calls)) // chunk % count, calls[order])
    return mapped


def read_function_trace(path: Path, minutes: slice = slice(None)) -> np.ndarray:
    """Read one day of Azure's trace of 2019 (``invocations_per_function_md.anon.d01.csv``).

    Args:
        path: the file. Four columns name a function, and columns ``1`` to ``1440`` contain its calls in each minute.
        minutes: minutes to keep, counted from 0.

    Returns:
        Calls, shape (functions, minutes), int64, of the functions that are called in these minutes.

    Raises:
        WorkloadError: the file does not have that form.
    """
    rows = []
    with path.open(newline="") as file:
        lines = csv.reader(file)
        header = next(lines, [])
        if tuple(header[:4]) != _ID_COLUMNS or not header[4:]:
            raise WorkloadError(f"{path}, line 1: expected the columns {', '.join(_ID_COLUMNS)}, 1, 2, …")
        for number, line in enumerate(lines, start=2):
            try:
                calls = np.array(line[4:], np.int64)
            except ValueError as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
            if len(line) != len(header) or (len(calls) and calls.min() < 0):
                raise WorkloadError(f"{path}, line {number}: expected {len(header) - 4} counts")
            kept = calls[minutes]
            if kept.any():
                rows.append(kept)
    if not rows:
        raise WorkloadError(f"{path} has no calls in the chosen minutes")
    return np.stack(rows)


class Invocation(NamedTuple):
    """Holds the time of a call and the index of its adapter."""

    at_s: float
    adapter: int


def calls_of_minutes(calls: np.ndarray, generator: np.random.Generator) -> list[Invocation]:
    """Return single calls in order of time, at random times within the minutes of the trace.

    Args:
        calls: number of calls per adapter and minute.
        generator: random generator, from which one is spawned for each adapter.
    """
    found = []
    for adapter, (counts, own) in enumerate(zip(calls, generator.spawn(len(calls)), strict=True)):
        minutes = np.repeat(np.arange(len(counts)), counts)
        times_s = (minutes + own.random(len(minutes))) * MINUTE_S
        found += [Invocation(at_s, adapter) for at_s in np.sort(times_s).tolist()]
    return sorted(found)


def unit_calls(
    shares: Sequence[float],
    variation: float,
    generator: np.random.Generator,
    *,
    count: int | None = None,
    until: float = math.inf,
) -> list[Invocation]:
    """Return independent calls of adapters in order of time, in total one per unit of time.

    The gaps of an adapter are gamma distributed. Each adapter starts at a random moment and not with a call, because
    otherwise all adapters would burst together at the start. The gap at a random moment has shape k + 1, and a uniform
    part of this gap has passed.

    Args:
        shares: share of all calls for each adapter; positive, of sum 1.
        variation: variation of the gaps, see ``arrivals.arrival_times``.
        generator: random generator, from which one is spawned for each adapter.
        count: number of calls to return, the first calls; None for all calls before ``until``.
        until: end of the time; ignored with a ``count``.

    Raises:
        OptionError: a variation is not positive.
    """
    if not variation > 0:
        raise OptionError(f"a variation of {variation} is not positive")
    shape = variation**-2
    streams = [_Stream(share, shape, own) for share, own in zip(shares, generator.spawn(len(shares)), strict=True)]
    if count is not None:
        until = 1.1 * count + 10
        # Bursts may leave too few calls, so the streams are extended.
        while sum(len(stream.until(until)) for stream in streams) < count:
            until *= 2
    times = [stream.until(until) for stream in streams]
    found = (Invocation(at, adapter) for adapter, own in enumerate(times) for at in own.tolist())
    return sorted(found)[:count]


class _Stream:
    """Draws the calls of one adapter as far as needed."""

    def __init__(self, share: float, shape: float, generator: np.random.Generator) -> None:
        self._share = share
        self._shape = shape
        self._generator = generator
        self.times = np.array([generator.random() * generator.gamma(shape + 1, 1 / (shape * share))])

    def until(self, end: float) -> np.ndarray:
        """Return all calls before ``end``; draw more if needed."""
        while self.times[-1] < end:
            wanted = int((end - self.times[-1]) * self._share) + 10
            gaps = self._generator.gamma(self._shape, 1 / (self._shape * self._share), wanted)
            self.times = np.concatenate([self.times, self.times[-1] + np.cumsum(gaps)])
        return self.times[self.times < end]
