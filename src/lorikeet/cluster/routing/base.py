"""The interface of a routing policy, and what the policies share: options, load comparisons, performance models.

The performance model says how long a step takes by the ranks in it (TOPPINGS, section 5, equation 2).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.cluster.routing.fleet import Fleet, Indices, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId
from lorikeet.core.plan import KernelForm


class PerformanceModel(msgspec.Struct, frozen=True):
    """Seconds of a step: ``slope_s * work + fixed_s``, and nothing for a step without requests.

    Work is the sum of ranks for the kernel form ``unpadded`` (MBGMV), and rows times the largest rank for ``padded``
    (BGMV). Rows are requests that have an adapter.

    Attributes:
        form: of the kernel.
        slope_s: per rank of a row (alpha).
        fixed_s: the base model and all else (beta).
        token_s: per token of a request that is prefilled. The paper's equation has no tokens; 0 is the paper.

    Raises:
        ValueError: the paper has no model of this form.
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
        """Return seconds of the step with one more request of a rank, and by how many they are more than before.

        Args:
            requests, rows, largest_rank, total_rank: counts of the step before, by replica.
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
        form: of the kernel.
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


class RoutingOptions(msgspec.Struct, frozen=True):
    """What policies are made with.

    Attributes:
        seed: of whatever is drawn.
        prefill, decode: performance models of a step, by requests and ranks; ``toppings`` needs both.
        slo_s: most time of a decode step; infinity for no limit.
        load_s, load_bytes_per_s: an adapter of b bytes comes to a device in ``load_s + b / load_bytes_per_s``.
    """

    seed: int = 0
    prefill: PerformanceModel | None = None
    decode: PerformanceModel | None = None
    slo_s: float = inf
    load_s: float = 0.0
    load_bytes_per_s: float = 25e9


class Router(ABC):
    """Chooses the replica of each request.

    Whoever asks then sends the request there and says so to the fleet (``Fleet.dispatched``): the next choice counts
    it. A router may remember its own choices, and takes it that they are followed.

    Attributes:
        wants_keys: ``RoutingRequest.keys`` must be filled.
    """

    wants_keys: bool = False
    _table: RoutingTable | None = None
    _homes: tuple[int, dict[int, Indices]] = (-1, {})

    @property
    def table(self) -> RoutingTable | None:
        """The placement to keep to; the owner assigns every new one. None if any replica may serve any adapter."""
        return self._table

    @table.setter
    def table(self, table: RoutingTable | None) -> None:
        self._table, self._homes = table, (-1, {})

    @abstractmethod
    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Return where a request should go.

        Args:
            asked: the request.
            fleet: what is known of all replicas.
            now: seconds on the owner's clock.

        Returns:
            A replica that is open; None if it should wait until something ends or somebody joins, and be asked for
            again then.
        """

    def candidates(self, asked: RoutingRequest, fleet: Fleet) -> Indices:
        """Return the open replicas that may serve a request, ascending.

        Those that the table names for its adapter; all, if it names none that is open, and for the base model.
        """
        if self._table is None or asked.adapter is None or asked.adapter not in self._table.shares:
            return fleet.open
        if self._homes[0] != fleet.changes:
            self._homes = (fleet.changes, {})
        # The same tuple has the same homes, and where adapters are everywhere they all have one.
        shares, known = self._table.shares[asked.adapter], self._homes[1]
        homes = known.get(id(shares))
        if homes is None:
            open_index = fleet.open_index
            there = sorted(open_index[share.replica] for share in shares if share.replica in open_index)
            homes = known[id(shares)] = np.array(there, np.intp) if there else fleet.open
        return homes


class LeastCost(Router):
    """Takes the replica that costs least, of equals the first; what it costs the policy says."""

    @abstractmethod
    def costs(self, asked: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return what a request costs at each replica."""

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        candidates = self.candidates(asked, fleet)
        return fleet.info(least(candidates, self.costs(asked, fleet))).replica if len(candidates) else None


def least(candidates: Indices, *keys: npt.NDArray[np.generic]) -> int:
    """Return the candidate with the least first key, of these with the least second and so on; the first of equals.

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
    """Return the candidate with the fewest requests, of these with the fewest tokens to compute; ``before`` goes first.

    Args:
        candidates: indices, at least one, ascending.
        fleet: what is known of all replicas.
        before: keys by replica.
    """
    return least(candidates, *before, fleet.loads.requests, fleet.loads.pending_tokens)


def with_room(asked: RoutingRequest, fleet: Fleet, candidates: Indices) -> Indices:
    """Return the candidates that have room for a request behind those that they have.

    A request that none of them could hold if it were empty is no reason to wait: then all are returned, and whichever
    gets it will refuse it, and say why.
    """
    loads, needed_tokens = fleet.loads, fleet.needed_tokens(asked, fleet.is_warm(asked.adapter))
    fitting = candidates[(needed_tokens <= loads.free_tokens)[candidates]]
    if len(fitting) or (needed_tokens <= loads.total_tokens)[candidates].any():
        return fitting
    return candidates
