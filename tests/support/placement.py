"""Demands by short names, and the worked examples of Algorithm 1."""

from collections.abc import Mapping, Sequence

from lorikeet.cluster.placement.by_rank import LoadPacking, PackingParams
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.core.ids import AdapterDigest, ReplicaId

LEVEL = OperatingPoints({8: 1000.0})
"""The same for every rank."""


def digest(name: str) -> AdapterDigest:
    return AdapterDigest(name)


def replicas_of(count: int) -> list[ReplicaId]:
    return [ReplicaId(f"S{number:04}") for number in range(count)]


def demand_of(name: str, rank: int, tokens_per_s: float) -> AdapterDemand:
    return AdapterDemand(digest(name), rank, rank << 21, tokens_per_s)


def demands_of(tokens_per_s: Mapping[int, Mapping[str, float]]) -> list[AdapterDemand]:
    """Return demands from rank, name and tokens per second."""
    return [demand_of(name, rank, load) for rank, of_rank in tokens_per_s.items() for name, load in of_rank.items()]


def packing_of(demands: Sequence[AdapterDemand], bins: int, points: OperatingPoints) -> LoadPacking:
    """Pack as the spec's examples do: without slivers, and leftovers may fill a bin a tenth above the target."""
    return LoadPacking(demands, bins, points, PackingParams(slack=0.10, min_fraction=0.01))


POINTS_A = OperatingPoints({8: 1000.0, 32: 800.0, 128: 500.0})
DEMANDS_A = demands_of({8: {"a1": 900, "a2": 500}, 32: {"b1": 400, "b2": 80}, 128: {"c1": 300, "c2": 100, "c3": 100}})
POINTS_B = OperatingPoints({8: 1000.0, 16: 950.0, 32: 900.0, 64: 800.0, 128: 600.0})
DEMANDS_B = demands_of({rank: {f"{rank}.{number}": 120 for number in range(5)} for rank in (8, 16, 32, 64, 128)})
DEMANDS_C = demands_of({128: {"p": 700, "q": 700}, 64: {"s": 1400}, 32: {"x": 400}, 16: {"y": 400}, 8: {"z": 400}})
