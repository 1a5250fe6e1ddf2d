"""Learns the costs of steps and loads from the replicas' reports, starting from an estimate or a profile."""

from collections.abc import Iterable, Mapping
from statistics import median

import msgspec

from lorikeet.core.ids import ReplicaId
from lorikeet.core.messages import EngineStats, RouteStats
from lorikeet.core.replica_costs import ReplicaCosts

TOLERANCE = 0.1
"""Relative change above which new costs replace those of the policies."""

REPORTS_SHARE = 0.1
"""Share of the replicas that must have sent a report before reports are combined again."""

_LEAST_BYTES = 1e6
"""Bytes that must have been loaded before the speed of loads counts."""
_TO_DEVICE = ("host-device", "source-device")


class LearnedCosts:
    """Takes the median of each cost over all replicas, which run on equal machines.

    Args:
        first: the costs before any report.

    Attributes:
        costs: costs that policies use.
    """

    def __init__(self, first: ReplicaCosts) -> None:
        self.costs = first
        self._steps: dict[ReplicaId, ReplicaCosts] = {}
        self._loads: dict[ReplicaId, Mapping[str, RouteStats]] = {}
        self._new_reports = 0

    def note(self, replica: ReplicaId, stats: EngineStats) -> bool:
        """Record a replica's report. Return whether :attr:`costs` have changed by more than ``TOLERANCE``."""
        if stats.costs is not None:
            self._steps[replica] = stats.costs
        self._loads[replica] = stats.memory.transfers
        self._new_reports += 1
        if self._new_reports < REPORTS_SHARE * len(self._loads):
            return False
        self._new_reports = 0
        found = self._combined()
        if found.is_near(self.costs, TOLERANCE):
            return False
        self.costs = found
        return True

    def forget(self, replica: ReplicaId) -> None:
        """Remove the report of a replica that has left."""
        self._steps.pop(replica, None)
        self._loads.pop(replica, None)

    def _combined(self) -> ReplicaCosts:
        found = self.costs
        if self._steps:
            parts = map(msgspec.structs.astuple, self._steps.values())
            found = ReplicaCosts(*map(median, zip(*parts, strict=True)))
        moved, busy_s = _sums(self._loads.values())
        bytes_per_s = moved / busy_s if moved > _LEAST_BYTES and busy_s > 0 else self.costs.load_bytes_per_s
        return msgspec.structs.replace(found, load_s=self.costs.load_s, load_bytes_per_s=bytes_per_s)


def _sums(loads: Iterable[Mapping[str, RouteStats]]) -> tuple[float, float]:
    routes = [routes[name] for routes in loads for name in _TO_DEVICE if name in routes]
    return float(sum(route.bytes for route in routes)), sum(route.busy_s for route in routes)
