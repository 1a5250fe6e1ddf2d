"""Cost of a prefill assisted by host workers, and whether it beats waiting (TOPPINGS)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from lorikeet.core import prefill_pipeline
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.interpolation import interpolate
from lorikeet.core.prefill_pipeline import LayerGroup, LayerTimes, PrefillCourse

WORKER_TOKENS = 16
"""Tokens of a worker where nothing was measured, or nothing fits: the paper's figures use 16 for 256 tokens."""


class RowSlice(NamedTuple):
    """Neighbouring rows of one request.

    Attributes:
        request: index of the request.
        first_row: among the rows of that request.
        rows: how many, at least 1.
    """

    request: int
    first_row: int
    rows: int


def slice_rows(tokens: Sequence[int], worker_tokens: int, workers: int) -> tuple[tuple[RowSlice, ...], ...]:
    """Cut the rows of requests over workers.

    Each request gets workers of its own, as many as it needs for at most ``worker_tokens`` rows each, and they share
    its rows evenly. If there are fewer workers, all rows stand in one line, which is cut evenly over all of them: a
    worker may then have the end of one request and the beginning of the next.

    Args:
        tokens: rows of each request; may be 0.
        worker_tokens: most rows of one worker while there are enough, at least 1.
        workers: how many are free, at least 1.

    Returns:
        For each worker that is used its slices; every row is in one of them.
    """
    shares = [_even_runs(rows, -(-rows // worker_tokens)) for rows in tokens]
    if sum(map(len, shares)) <= workers:
        return tuple(
            (RowSlice(request, first, stop - first),) for request, bounds in enumerate(shares) for first, stop in bounds
        )
    return tuple(_cut_line(tokens, first, stop) for first, stop in _even_runs(sum(tokens), workers))


def largest_share(tokens: int, worker_tokens: int, workers: int) -> int:
    """Return the most rows that :func:`slice_rows` gives a worker of one request alone."""
    used = min(workers, -(-tokens // worker_tokens))
    return -(-tokens // used) if used else 0


def tokens_within_budget(budget_s: float, measured: Iterable[tuple[int, float]]) -> int:
    """Return how many tokens a worker may take: the most that it was measured to compute within ``budget_s``.

    A layer on the host costs no more than loading it if the budget is the time of the q, k, v product, which hides it,
    plus the load of the layer.

    Args:
        budget_s: seconds.
        measured: (tokens, seconds) of one worker.

    Returns:
        The largest count within the budget, or ``WORKER_TOKENS`` if there is none.
    """
    return max((tokens for tokens, seconds in measured if seconds <= budget_s), default=WORKER_TOKENS)


def _even_runs(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``presets`` into ``parts`` (at most as many) half-open runs whose lengths differ by one at most."""
    bounds = [rows * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(bounds))


def _cut_line(tokens: Sequence[int], first: int, stop: int) -> tuple[RowSlice, ...]:
    """Return the rows from ``first`` to ``stop`` of all requests one after the other."""
    slices = []
    begin = 0
    for request, rows in enumerate(tokens):
        low, high = max(first, begin), min(stop, begin + rows)
        if low < high:
            slices.append(RowSlice(request, low - begin, high - low))
        begin += rows
    return tuple(slices)


ASSISTED_MODULES = ("q", "k", "v")
"""The modules that host workers compute (TOPPINGS, section 2.1)."""


class AssistCosts(msgspec.Struct, frozen=True):
    """Constants of assisted prefills, and the options of the preset that bear on them.

    A rank counts as one over all of ``ASSISTED_MODULES``: an adapter of two of them has less than the rank it is named
    for (:meth:`rank`). Times are of one layer, of all ranks under tensor parallelism.

    Attributes:
        layers: of the model.
        row_bytes: of one rank row of each of ``ASSISTED_MODULES`` (:func:`row_bytes`).
        device_layer: (tokens, seconds) of a layer in a prefill, ascending; see ``core.interpolation``.
        qkv_share: share of that time in which the device computes q, k and v of the base model, beside which the host
            works. 0 where host workers take the cores that would compute it: then nothing is hidden.
        host_fixed_s: the rows to a worker and its result back, per layer.
        host_token_s: the same, per token, one after the other.
        host_token_rank_s: one worker, per rank of a token.
        load_fixed_s: once per group of layers that is loaded.
        load_bandwidth: bytes per second over the link.
        workers: host workers.
        worker_tokens: tokens that suit one worker (``slices.tokens_within_budget``), times the row's ``host_chunk``.
        one_group: ``layer_groups`` of the preset: whether an adapter arrives at once.
        is_static: ``host_layers`` of the preset: whether groups but the one that is loaded last are waited for.
        waits: whether a layer waits for its arrival where that is sooner than the host.
    """

    layers: int
    row_bytes: dict[str, int]
    device_layer: tuple[tuple[int, float], ...]
    qkv_share: float
    host_fixed_s: float
    host_token_s: float
    host_token_rank_s: float
    load_fixed_s: float
    load_bandwidth: float
    workers: int
    worker_tokens: int
    one_group: bool = False
    is_static: bool = False
    waits: bool = False

    def can_assist(self, ref: AdapterRef) -> bool:
        """Whether host workers compute everything that the adapter adds."""
        return all(module in self.row_bytes for module, by_layer in ref.ranks.items() if any(by_layer))

    def rank(self, ref: AdapterRef) -> float:
        """Return the adapter's rank, by its bytes and as a mean over the layers; other modules do not count."""
        held = sum(row_bytes * sum(ref.ranks.get(module, ())) for module, row_bytes in self.row_bytes.items())
        return held / (self.layers * self._rank_bytes)

    def device_layer_s(self, tokens: int) -> float:
        """Return the time of a layer in a prefill of so many tokens on the device."""
        return interpolate(self.device_layer, tokens)

    def host_layer_s(self, tokens: int, rank: float) -> float:
        """Return the time of a layer on which host workers compute for all ``tokens``.

        The rest of the layer needs q, k and v with what the adapter adds, so only their product hides the host's work.
        """
        device_s = self.device_layer_s(tokens)
        share = largest_share(tokens, self.worker_tokens, self.workers)
        host_s = self.host_fixed_s + self.host_token_s * tokens + self.host_token_rank_s * rank * share
        return device_s + max(0.0, host_s - self.qkv_share * device_s)

    def times(self, tokens: int, rank: float) -> LayerTimes:
        """Return what the recurrence needs of a prefill of ``tokens`` under an adapter of ``rank``."""
        return LayerTimes(
            self.layers,
            self.host_layer_s(tokens, rank),
            self.device_layer_s(tokens),
            rank * self._rank_bytes / self.load_bandwidth,
            self.load_fixed_s,
        )

    def layer_groups(self, ref: AdapterRef, tokens: int) -> tuple[LayerGroup, ...]:
        """Return the groups of layers, each (first, after the last), in the order in which they are to arrive.

        They are planned for a prefill of ``tokens`` rounded up to a power of two, so that few plans serve all prompts.
        """
        times = self.times(1 << (tokens - 1).bit_length(), self.rank(ref))
        if self.one_group:
            return prefill_pipeline.one_group(times, is_static=self.is_static, waits=self.waits).groups
        return prefill_pipeline.plan(times, is_static=self.is_static, waits=self.waits).groups

    def assisted(self, ref: AdapterRef, tokens: int) -> PrefillCourse:
        """Return the course of a prefill of ``tokens`` that begins with the transfer of its adapter."""
        groups, times = self.layer_groups(ref, tokens), self.times(tokens, self.rank(ref))
        return (
            prefill_pipeline.static(times, groups)
            if self.is_static
            else prefill_pipeline.dynamic(times, groups, waits=self.waits)
        )

    def waiting_s(self, ref: AdapterRef, tokens: int) -> float:
        """Return when that prefill is done if it begins after the transfer."""
        return self.times(tokens, self.rank(ref)).load_then_prefill_s

    def pays(self, ref: AdapterRef, tokens: int) -> bool:
        """Whether assistance is possible and brings the first token sooner than waiting."""
        return self.can_assist(ref) and self.assisted(ref, tokens).first_token_s < self.waiting_s(ref, tokens)

    @property
    def _rank_bytes(self) -> int:
        """Bytes of one rank on one layer."""
        return sum(self.row_bytes.values())


def row_bytes(geometry: ModelGeometry) -> dict[str, int]:
    """Return the bytes of one rank row of each of ``ASSISTED_MODULES``."""
    shapes = {module: geometry.modules[module] for module in ASSISTED_MODULES}
    return {name: (shape.in_features + shape.out_features) * geometry.dtype_bytes for name, shape in shapes.items()}


def qkv_share(geometry: ModelGeometry) -> float:
    """Return the share of the products of q, k and v in all products of a layer."""
    products = {name: shape.in_features * shape.out_features for name, shape in geometry.modules.items()}
    return sum(products[module] for module in ASSISTED_MODULES) / sum(products.values())
