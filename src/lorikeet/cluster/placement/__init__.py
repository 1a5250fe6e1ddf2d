"""Placement policies: which replicas serve an adapter, and with what share of its requests."""

from collections.abc import Callable

import msgspec

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.burst import BurstTolerance
from lorikeet.cluster.placement.loraserve import RANK_GROUPS, LoRAServe, LoRAServeParams
from lorikeet.cluster.placement.operating_points import Points
from lorikeet.cluster.placement.static import ContiguousPlacement, FullReplication, RandomPlacement


class PlacementOptions(msgspec.Struct, frozen=True):
    """The options that placement policies are built with.

    Attributes:
        seed: of all random draws.
        points: operating points; LoRAServe's placements need them.
        memory_bytes: of each replica, for adapters and KV; ``dlora`` needs it.
        request_bytes: KV of a mean request; ``dlora`` needs it.
        reserved_share: of a replica's memory, for further copies by ``dlora``.
    """

    seed: int = 0
    points: Points | None = None
    memory_bytes: int = 0
    request_bytes: float = 0.0
    reserved_share: float = 0.0


def _loraserve(options: PlacementOptions, params: LoRAServeParams | None = None) -> LoRAServe:
    if options.points is None:
        raise ValueError("LoRAServe's placement needs operating points: run lorikeet profile --operating-points")
    return LoRAServe(options.points, params)


def _burst_tolerance(options: PlacementOptions) -> BurstTolerance:
    if options.memory_bytes <= 0 or options.request_bytes <= 0:
        raise ValueError("dLoRA's placement needs the memory of a replica and that of a mean request's KV")
    return BurstTolerance(options.memory_bytes, options.request_bytes, options.reserved_share)


PLACEMENT: dict[str, Callable[[PlacementOptions], PlacementPolicy]] = {
    "everywhere": lambda _: FullReplication(),
    "random": lambda options: RandomPlacement(options.seed),
    "random-iid": lambda options: RandomPlacement(options.seed, balanced=False),
    "contiguous": lambda _: ContiguousPlacement(),
    "loraserve": _loraserve,
    "rank-groups": lambda options: _loraserve(options, RANK_GROUPS),
    "dlora": _burst_tolerance,
}
"""The values of a preset's ``placement``. A new policy is one file and one line here."""
