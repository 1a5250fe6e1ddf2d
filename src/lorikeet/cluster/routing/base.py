"""The interface of a routing policy, and what the policies share: options, load comparisons, performance models.

The performance model predicts the time of a step from the ranks in it (TOPPINGS, section 5, equation 2).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.cluster.routing.fleet import Fleet, Indices, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts


class PerformanceModel(msgspec.Struct, frozen=True):
    """Seconds of a step: ``slope_s * work + fixed_s``; a step without requests takes no time.

    Work is the sum of ranks for the kernel form ``unpadded`` (MBGMV), and rows times the largest rank for ``padded``
    (BGMV). Rows are requests that have an adapter.

    Attributes:
        form: kernel form.
        slope_s: per rank of a row (alpha).
        fixed_s: the base model and everything else (beta).
        token_s: per prefilled token of a request. The paper's equation has no tokens: 0 is the paper.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    form: KernelForm
    slope_s: float
    fixed_s: float
    token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.form is KernelForm.EINSUM:
            raise ValueError("There is no performance model of the form einsum")

    def added_seconds(
        self, requests: Numbers, rows: Numbers, largest_rank: Numbers, total_rank: Numbers, rank: int
    ) -> tuple[Numbers, Numbers]:
        """Return by replica the seconds of a step with one more request, and how many of them the request adds.

        Args:
            requests, rows, largest_rank, total_rank: counts of the step without it, by replica.
            rank: of the request. Its tokens are not counted.
        """
        if self.form is KernelForm.UNPADDED:
            work = total_rank + rank
        else:
            work = (rows + bool(rank)) * np.maximum(largest_rank, rank)
        added = self.slope_s * (work - self._work(rows, largest_rank, total_rank)) + self.fixed_s * (requests == 0)
        return self.slope_s * work + self.fixed_s, added

    def _work(self, rows: Numbers, largest_rank: Numbers, total_rank: Numbers) -> Numbers:
        return total_rank if self.form is KernelForm.UNPADDED else rows * largest_rank


def fit_performance(form: KernelForm, steps: Iterable[tuple[Sequence[int], float]]) -> PerformanceModel:
    """Fit the model to measured steps by least squares.

    Args:
        form: kernel form.
        steps: ranks of a step's requests, and its seconds; at least two different amounts of work.

    Raises:
        ValueError: there are fewer.
    """
    measured = list(steps)
    unpadded = form is KernelForm.UNPADDED
    work = [sum(ranks) if unpadded else max(ranks, default=0) * sum(map(bool, ranks)) for ranks, _ in measured]
    if len(set(work)) < 2:
        raise ValueError("A performance model needs two different steps")
    slope_s, fixed_s = np.polyfit(work, [seconds for _, seconds in measured], 1)
    return PerformanceModel(form, float(slope_s), float(fixed_s))


_BATCHES = (4, 8, 16, 32)
_RANKS = (8, 16, 32, 64)
"""Ranks of the steps that performance models are fitted to, with ``_BATCHES``: those of TOPPINGS (section 5)."""

StepSeconds = Callable[[int, int], float]
"""Returns the seconds of a step of so many requests of one rank, each with its own adapter."""


def fit_models(
    form: KernelForm, prefill_s: StepSeconds, decode_s: StepSeconds
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return TOPPINGS' PrePerf and DecPerf, fitted to steps of several batch sizes and ranks, as in the paper.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    def fit(step_s: StepSeconds) -> PerformanceModel:
        steps = [((rank,) * batch, step_s(batch, rank)) for rank in _RANKS for batch in _BATCHES]
        return fit_performance(form, steps)

    return fit(prefill_s), fit(decode_s)


def models_of_costs(
    costs: ReplicaCosts, form: KernelForm, prompt_tokens: int
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return the same models of a replica with these costs. The tokens of a prompt are part of the slope.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    def prefill_s(batch: int, rank: int) -> float:
        return costs.step_s + costs.lora_s + costs.prefill_s(batch * prompt_tokens, rank)

    return fit_models(form, prefill_s, lambda batch, rank: costs.decode_step_s(batch, rank))


class RoutingOptions(msgspec.Struct, frozen=True):
    """The options that routing policies are built with.

    Attributes:
        seed: of all random draws.
        prefill, decode: performance models of a step, by requests and ranks; ``toppings`` needs both.
        slo_s: longest decode step; infinity for no limit, 0 for ``UNLOADED_TIMES`` the shortest.
        load_s, load_bytes_per_s: an adapter of b bytes is loaded to the device in ``load_s + b / load_bytes_per_s``.
        costs: of a replica; ``seconds`` needs them.
        kernel_form: of every replica.
        mean_tokens: prompt and answer of a mean request, by which performance models are fitted again.
    """

    seed: int = 0
    prefill: PerformanceModel | None = None
    decode: PerformanceModel | None = None
    slo_s: float = inf
    load_s: float = 0.0
    load_bytes_per_s: float = 25e9
    costs: ReplicaCosts | None = None
    kernel_form: KernelForm = KernelForm.UNPADDED
    mean_tokens: tuple[int, int] = (512, 128)


class Choice(NamedTuple):
    """The replica for a request.

    Attributes:
        replica: an open one.
        saved_s: seconds, over all requests, by which it is cheaper than the mean of the open replicas; 0 if the policy
            does not compare seconds.
    """

    replica: ReplicaId
    saved_s: float = 0.0


class AdapterPlaces(NamedTuple):
    """Where a request's adapter should be, and where it is.

    Attributes:
        table: the routing table to follow; None if any replica may serve any adapter.
        holders: replicas whose machine has a copy of the adapter; None if all machines have one.
    """

    table: RoutingTable | None = None
    holders: Set[ReplicaId] | None = None


ANYWHERE = AdapterPlaces()
"""Any replica may serve the request, and every machine has its adapter."""


class RoutingPolicy(ABC):
    """Chooses the replica of each request.

    The caller sends the request there and informs the fleet (``Fleet.dispatched``), so that the next choice counts it.
    A policy may remember its choices, and assumes that they are followed.

    Attributes:
        wants_keys: whether ``RoutingRequest.keys`` must be filled.
    """

    wants_keys: bool = False
    _homes: "_Homes | None" = None

    @abstractmethod
    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica for a request.

        Args:
            request: the request to route.
            fleet: state of all replicas.
            places: where its adapter should be, and where it is.
            now: seconds on the caller's clock.

        Returns:
            The choice; None if the request should wait until a request ends or a replica joins, and be routed then.
        """

    def learn(self, costs: ReplicaCosts) -> None:  # noqa: B027  # optional
        """Use other costs of a replica from now on. Policies that do not compare costs ignore them."""

    def candidates(self, request: RoutingRequest, fleet: Fleet, table: RoutingTable | None) -> Indices:
        """Return the indices of the open replicas that may serve a request, ascending.

        These are the ones that the table names for its adapter. If none of them is open, and for the base model, all
        open replicas may serve it.
        """
        if table is None or request.adapter is None or request.adapter not in table.shares:
            return fleet.open
        if self._homes is None or self._homes.table is not table or self._homes.changes != fleet.changes:
            self._homes = _Homes(table, fleet.changes, {})
        # Cached by tuple: with full replication all adapters share one.
        shares = table.shares[request.adapter]
        homes = self._homes.by_shares.get(id(shares))
        if homes is None:
            open_index = fleet.open_index
            there = sorted(open_index[share.replica] for share in shares if share.replica in open_index)
            homes = np.array(there, np.intp) if there else fleet.open
            self._homes.by_shares[id(shares)] = homes
        return homes


class _Homes(NamedTuple):
    """The candidates of adapters, valid for one table while the fleet does not change; by the id of their shares."""

    table: RoutingTable
    changes: int
    by_shares: dict[int, Indices]


class LeastCost(RoutingPolicy):
    """Chooses the replica with the lowest cost, the first among equals. Subclasses define the cost."""

    @abstractmethod
    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the cost of a request at each replica."""

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the cheapest replica."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        return Choice(fleet.info(least(candidates, self.costs(request, fleet))).replica)


def least(candidates: Indices, *keys: npt.NDArray[np.generic]) -> int:
    """Return the candidate with the smallest first key; among equals by the next key, then the first.

    Args:
        candidates: indices, at least one, ascending.
        keys: arrays by replica.
    """
    for key in keys:
        values = key[candidates]
        candidates = candidates[values == values[values.argmin()]]
        if len(candidates) == 1:
            break
    return int(candidates[0])


def least_loaded(candidates: Indices, fleet: Fleet, *before: npt.NDArray[np.generic]) -> int:
    """Return the candidate with the fewest requests, among equals the one with the fewest tokens to compute.

    Args:
        candidates: indices, at least one, ascending.
        fleet: state of all replicas.
        before: keys by replica that are compared first.
    """
    return least(candidates, *before, fleet.loads.requests, fleet.loads.pending_tokens)


def with_capacity(request: RoutingRequest, fleet: Fleet, candidates: Indices) -> Indices:
    """Return the candidates that have free memory for a request behind the requests that they have.

    If the request would not even fit an empty candidate, waiting does not help: then all are returned, and the engine
    that gets it rejects it with a reason.
    """
    loads, needed_tokens = fleet.loads, fleet.needed_tokens(request, fleet.is_warm(request.adapter))
    fitting = candidates[(needed_tokens <= loads.free_tokens)[candidates]]
    if len(fitting) or (needed_tokens <= loads.total_tokens)[candidates].any():
        return fitting
    return candidates
