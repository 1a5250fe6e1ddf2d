"""Compares the costs of prefills assisted by host workers and of prefills that wait for the adapter (TOPPINGS).

The module also divides the rows of a batch among host workers, because the cost depends on the largest share.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.interpolation import interpolate
from lorikeet.costs import prefill_pipeline
from lorikeet.costs.prefill_pipeline import LayerGroup, LayerTimes, PrefillCourse

WORKER_TOKENS = 16
"""Number of tokens per worker if no measurement exists or fits. The paper's figures use 16 for 256 tokens."""


class RowSlice(NamedTuple):
    """Describes consecutive rows of one request for one worker.

    Attributes:
        request: index of the request.
        first_row: index of the first row within the request.
        rows: number of rows, at least 1.
    """

    request: int
    first_row: int
    rows: int


def slice_rows(tokens: Sequence[int], worker_tokens: int, workers: int) -> tuple[tuple[RowSlice, ...], ...]:
    """Divide the rows of requests among workers.

    Each request gets separate workers, enough for at most ``worker_tokens`` rows per worker, and its rows are divided
    evenly. If workers are too few, the rows of all requests are concatenated and divided evenly. In that case a worker
    may get the end of one request and the beginning of the next.

    Args:
        tokens: number of rows of each request; may be 0.
        worker_tokens: largest number of rows per worker if enough workers are free; at least 1.
        workers: number of free workers, at least 1.

    Returns:
        The slices of each worker that is used. Every row is in exactly one slice.
    """
    shares = [_even_ranges(rows, -(-rows // worker_tokens)) for rows in tokens]
    if sum(map(len, shares)) <= workers:
        return tuple(
            (RowSlice(request, first, stop - first),) for request, bounds in enumerate(shares) for first, stop in bounds
        )
    return tuple(_slices_between(tokens, first, stop) for first, stop in _even_ranges(sum(tokens), workers))


def largest_share(tokens: int, worker_tokens: int, workers: int) -> int:
    """Return the largest number of rows that :func:`slice_rows` assigns to a worker for a single request."""
    used = min(workers, -(-tokens // worker_tokens))
    return -(-tokens // used) if used else 0


def tokens_within_budget(budget_s: float, measured: Iterable[tuple[int, float]]) -> int:
    """Return the largest measured number of tokens that a worker computes within ``budget_s``.

    The budget is the time of the q, k, v product, which hides the host's work, plus the time to load the layer. Within
    this budget, a layer on the host costs no more time than loading it.

    Args:
        budget_s: seconds.
        measured: measured (tokens, seconds) of one worker.

    Returns:
        The largest token count within the budget; ``WORKER_TOKENS`` if no count is.
    """
    return max((tokens for tokens, seconds in measured if seconds <= budget_s), default=WORKER_TOKENS)


def _even_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """Divide ``rows`` into ``parts <= rows`` half-open ranges whose lengths differ by at most one."""
    bounds = [rows * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(bounds))


def _slices_between(tokens: Sequence[int], first: int, stop: int) -> tuple[RowSlice, ...]:
    """Return the slices of rows ``first`` to ``stop`` (half-open) of all requests concatenated."""
    slices = []
    begin = 0
    for request, rows in enumerate(tokens):
        low = max(first, begin)
        high = min(stop, begin + rows)
        if low < high:
            slices.append(RowSlice(request, low - begin, high - low))
        begin += rows
    return tuple(slices)


UNIT_MODULES = ("q", "k", "v")
"""Modules over which one rank is defined, as in TOPPINGS (section 2.1). Adapters on other modules count by size."""

SPLIT_BY_INPUT = frozenset({"o", "down"})
"""Products whose input is split among tensor-parallel ranks, so that rank 0 cannot send the whole input to the host."""


def assisted_modules(ranks: int = 1) -> tuple[str, ...]:
    """Return the modules that host workers compute, given the number of tensor-parallel ranks."""
    products = (name for name in PRODUCTS if ranks == 1 or name not in SPLIT_BY_INPUT)
    return tuple(module for name in products for module in PRODUCTS[name])


class AssistCosts(msgspec.Struct, frozen=True):
    """Holds the measured constants of assisted prefills, and the preset's options for them.

    Ranks are averages over ``UNIT_MODULES``. So an adapter that changes two of these modules counts less than its
    nominal rank, and an adapter that changes all modules counts more (:meth:`rank`). Times are for one layer, over all
    tensor-parallel ranks.

    Attributes:
        layers: layers of the model.
        row_bytes: bytes of one rank row of each module that host workers compute (:func:`row_bytes`).
        device_layer: (tokens, seconds) of a layer in a prefill without adapters on the device, ascending.
        qkv_share: share of that time in which the device computes q, k and v of the base model while the host works. 0
            if host workers use the cores that compute the base model, because then no work is hidden.
        host_fixed_s: time to send rows to a worker and return its result, per layer and product that the adapter
            changes.
        host_token_s: additional time of this transfer, per token.
        host_token_rank_s: compute time of a worker, per token and rank.
        load_fixed_s: overhead per loaded group of layers.
        load_bandwidth: bytes per second over the link.
        workers: number of host workers.
        worker_tokens: tokens per worker (:func:`tokens_within_budget`), times the preset's ``host_chunk``.
        one_group: whether an adapter is loaded in one group (the preset's ``layer_groups``).
        is_static: whether prefills wait for all groups except the last (the preset's ``host_layers``).
        waits: whether a layer waits for its weights if they arrive before the host would finish.
        device_token_rank_s: time that an adapter adds to a layer on the device, per token and rank; 0 if not measured.
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
    device_token_rank_s: float = 0.0

    def can_assist(self, ref: AdapterRef) -> bool:
        """Return whether host workers can compute all changes of the adapter."""
        return not ref.extras and all(
            module in self.row_bytes for module, by_layer in ref.ranks.items() if any(by_layer)
        )

    def rank(self, ref: AdapterRef) -> float:
        """Return the adapter's size in ranks over ``UNIT_MODULES`` and all layers."""
        held = sum(row_bytes * sum(ref.ranks.get(module, ())) for module, row_bytes in self.row_bytes.items())
        return held / (self.layers * self._rank_bytes)

    def handovers(self, ref: AdapterRef) -> int:
        """Return the number of products per layer that an adapter changes.

        Each product is sent to the host separately.
        """
        changed = {module for module, by_layer in ref.ranks.items() if any(by_layer)}
        return sum(not changed.isdisjoint(modules) for modules in PRODUCTS.values())

    def device_layer_s(self, tokens: int) -> float:
        """Return the seconds of a layer in a prefill of this many tokens on the device without an adapter."""
        return interpolate(self.device_layer, tokens)

    def host_layer_s(self, tokens: int, rank: float, handovers: int = 1) -> float:
        """Return the time of a layer on which host workers compute the LoRA delta of all ``tokens``.

        Only the q, k, v product hides the host's work, because the rest of the layer needs the result. If an adapter
        changes further products, they are assumed to hide no work.
        """
        device_s = self.device_layer_s(tokens)
        share = largest_share(tokens, self.worker_tokens, self.workers)
        host_s = handovers * (self.host_fixed_s + self.host_token_s * tokens) + self.host_token_rank_s * rank * share
        return device_s + max(0.0, host_s - self.qkv_share * device_s)

    def times(self, tokens: int, rank: float, handovers: int = 1) -> LayerTimes:
        """Return the layer times of a prefill of ``tokens`` under an adapter of ``rank``."""
        return LayerTimes(
            self.layers,
            self.host_layer_s(tokens, rank, handovers),
            self.device_layer_s(tokens) + self.device_token_rank_s * rank * tokens,
            rank * self._rank_bytes / self.load_bandwidth,
            self.load_fixed_s,
        )

    def layer_groups(self, ref: AdapterRef, tokens: int) -> tuple[LayerGroup, ...]:
        """Return the groups of layers, each (first, after the last), in load order.

        The groups are planned for ``tokens`` rounded up to a power of two, so that a few cached plans serve all
        prompts.
        """
        times = self.times(1 << (tokens - 1).bit_length(), self.rank(ref), self.handovers(ref))
        if self.one_group:
            return prefill_pipeline.one_group(times, is_static=self.is_static, waits=self.waits).groups
        return prefill_pipeline.plan(times, is_static=self.is_static, waits=self.waits).groups

    def assisted(self, ref: AdapterRef, tokens: int) -> PrefillCourse:
        """Return the schedule of an assisted prefill of ``tokens`` that starts together with the adapter's transfer."""
        groups = self.layer_groups(ref, tokens)
        times = self.times(tokens, self.rank(ref), self.handovers(ref))
        return (
            prefill_pipeline.static(times, groups)
            if self.is_static
            else prefill_pipeline.dynamic(times, groups, waits=self.waits)
        )

    def cached_s(self, ref: AdapterRef, tokens: int) -> float:
        """Return the time of a prefill whose adapter is on the device."""
        return self.times(tokens, self.rank(ref), self.handovers(ref)).cached_s

    def waiting_s(self, ref: AdapterRef, tokens: int) -> float:
        """Return the time of a prefill that starts after the adapter's transfer, including the transfer."""
        return self.times(tokens, self.rank(ref), self.handovers(ref)).load_then_prefill_s

    def pays(
        self,
        ref: AdapterRef,
        tokens: int,
        ratio: float = 1.0,
        *,
        delay_per_lost_second: float = 0.0,
        step_s: float = 0.0,
    ) -> bool:
        """Return whether assistance is possible, and saves the request more time than it costs all other requests.

        While a request waits for its adapter, other requests run as usual. A step with an assisted prefill takes as
        long as the prefill, for all sequences in the step, and is an additional step.

        Args:
            ref: the adapter.
            tokens: tokens of the prefill.
            ratio: error of assisted prefills' predictions, as a multiple of the error for prefills that waited
                (:class:`AssistRecord`).
            delay_per_lost_second: total seconds by which all other requests are delayed if the engine loses a second.
            step_s: fixed seconds of one more step, because an assisted prefill may run in a separate step.
        """
        if not self.can_assist(ref):
            return False
        first_token_s = ratio * self.assisted(ref, tokens).first_token_s
        longer_s = step_s + max(0.0, first_token_s - self.cached_s(ref, tokens))
        return first_token_s + delay_per_lost_second * longer_s < self.waiting_s(ref, tokens)

    @property
    def _rank_bytes(self) -> int:
        """Return the bytes of one rank row of all ``UNIT_MODULES`` on one layer."""
        return sum(self.row_bytes[module] for module in UNIT_MODULES)


def row_bytes(geometry: ModelGeometry, ranks: int = 1) -> dict[str, int]:
    """Return the bytes of one rank row of each module that host workers compute for this many ranks."""
    return {module: geometry.row_elements(module) * geometry.dtype_bytes for module in assisted_modules(ranks)}


def qkv_share(geometry: ModelGeometry) -> float:
    """Return the share of the products of q, k and v in all products of a layer."""
    products = {name: shape.in_features * shape.out_features for name, shape in geometry.modules.items()}
    return sum(products[module] for module in UNIT_MODULES) / sum(products.values())


_WEIGHT = 0.2
_FORGET = 0.02
_LEAST = 0.1
_MOST = 10.0


class AssistRecord:
    """Compares the durations of cold prefills, assisted or waiting, with their predictions.

    Other work of the engine delays both kinds, so the ratio of their errors corrects the decision between them. While
    the ratio prevents assisted prefills, it slowly returns to 1, so that assistance is tried again.
    """

    def __init__(self) -> None:
        self._assisted = self._waited = 1.0

    @property
    def ratio(self) -> float:
        """Error of assisted prefills' predictions, as a multiple of the error of waiting prefills."""
        return self._assisted / self._waited

    def note(self, predicted_s: float, took_s: float, *, is_assisted: bool) -> None:
        """Record the time from admission to the first token of a cold request."""
        if predicted_s <= 0:
            return
        off = min(max(took_s / predicted_s, _LEAST), _MOST)
        if is_assisted:
            self._assisted += _WEIGHT * (off - self._assisted)
        else:
            self._waited += _WEIGHT * (off - self._waited)
            self._assisted += _FORGET * (self._waited - self._assisted)
