"""What moves cost: transfers between the tiers, and merging another adapter into the base weights."""

from collections.abc import Mapping, Set
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.plan import Tier, Transfer
from lorikeet.costs.model import adapter_elements
from lorikeet.costs.profile import Constant, CostProfile, Link
from lorikeet.presets import MergeBy


class LinkDirection(StrEnum):
    """A direction. What goes in one does not wait for what goes in another."""

    IN = "in"
    """From the host to the device."""
    OUT = "out"
    """From the device to the host."""
    READ = "read"
    """From an adapter's files."""


class TransferLeg(NamedTuple):
    """The seconds that something takes alone, in one direction."""

    way: LinkDirection
    seconds: float


class TransferPath(NamedTuple):
    """How a transfer goes.

    Attributes:
        legs: where each of its parts goes, one leg after the other.
        parts: how many follow one another, all alike: one goes its second leg while the next goes its first.
        groups_s: instead of ``parts``, the seconds of each group of blocks of a copy, in the order in which they go;
            its one leg says where.
    """

    legs: tuple[TransferLeg, ...]
    parts: int = 1
    groups_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds from begin to end if nothing else moves."""
        if self.groups_s:
            return sum(self.groups_s)
        seconds = [leg.seconds for leg in self.legs]
        return sum(seconds) + (self.parts - 1) * max(seconds)


class TransferModel:
    """Seconds of transfers, by one profile.

    Copies move whole blocks, reads the bytes of an adapter's weights. Under tensor parallelism every rank moves its
    part, all at once; blocks here are those of the whole model.

    Args:
        profile: whose links it uses.
        block_bytes: of a block of the whole model.
        link_bytes_per_s: of a declared link (``engine.link_bytes_per_s``), which then stands for both directions of
            each rank, without a fixed part; 0 for the profile's.

    Attributes:
        profile, block_bytes: as given.
    """

    def __init__(self, profile: CostProfile, block_bytes: int, link_bytes_per_s: float = 0.0) -> None:
        self.profile = profile
        self.block_bytes = block_bytes
        self._declared_bytes_per_s = link_bytes_per_s * profile.tensor_parallel

    def course(self, transfer: Transfer) -> TransferPath:
        """Return how a transfer goes.

        A copy in groups pays a link's fixed part for each.

        Weights that go to the device by way of the host are read block by block, and each block is copied on while the
        next is read. So are those that take none of the host's blocks if a link is declared, as nothing reaches the
        device but over it; else they go at once.

        Raises:
            ProfileError: the profile does not know a link.
        """
        if transfer.groups:
            assert transfer.source is Tier.HOST, "only what lies on the host arrives in groups"
            groups_s = tuple(self.copy_s(LinkDirection.IN, stop - first) for first, stop in transfer.groups)
            return TransferPath((TransferLeg(LinkDirection.IN, sum(groups_s)),), groups_s=groups_s)
        if transfer.source is not Tier.SOURCE:
            way = LinkDirection.IN if transfer.target is Tier.DEVICE else LinkDirection.OUT
            return TransferPath((TransferLeg(way, self.copy_s(way, len(transfer.device_blocks))),))
        assert transfer.adapter is not None, "only adapters have files"
        if not (transfer.host_blocks or self._declared_bytes_per_s):
            return TransferPath((TransferLeg(LinkDirection.READ, self.source_s(transfer.adapter, Tier.DEVICE)),))
        read_s, blocks = self.source_s(transfer.adapter, Tier.HOST), len(transfer.device_blocks)
        if transfer.target is Tier.HOST:
            return TransferPath((TransferLeg(LinkDirection.READ, read_s),))
        copy_s = self.copy_s(LinkDirection.IN, blocks)
        return TransferPath(
            (TransferLeg(LinkDirection.READ, read_s / blocks), TransferLeg(LinkDirection.IN, copy_s / blocks)), blocks
        )

    def source_s(self, ref: AdapterRef, target: Tier) -> float:
        """Return the time from an adapter's files into blocks of a tier.

        Raises:
            ProfileError: the profile does not know it.
        """
        known, need = self.profile.transfers, self.profile.need
        link = (
            need(known.source_to_host, "transfers.source_to_host")
            if target is Tier.HOST
            else need(known.source_to_device, "transfers.source_to_device")
        )
        geometry = self.profile.geometry
        return link.seconds(adapter_elements(ref.ranks, geometry) * geometry.dtype_bytes)

    def copy_s(self, way: LinkDirection, blocks: int) -> float:
        """Return the time to copy so many blocks between the tiers.

        Raises:
            ProfileError: the profile does not know it, and no link is declared.
        """
        return self.link(way).seconds(blocks * self.block_bytes)

    def model_s(self) -> float:
        """Return the time to bring a whole base model from the host to the device.

        Raises:
            ProfileError: the profile does not know its size, or the link, and none is declared.
        """
        return self.link(LinkDirection.IN).seconds(self.profile.need(self.profile.weight_bytes, "weight_bytes"))

    def link(self, way: LinkDirection) -> Link:
        """Return the link between the tiers in one direction.

        Raises:
            ProfileError: the profile does not know it, and none is declared.
        """
        if self._declared_bytes_per_s:
            return Link(Constant(0.0, "s"), Constant(self._declared_bytes_per_s, "bytes/s"))
        known, need = self.profile.transfers, self.profile.need
        if way is LinkDirection.IN:
            return need(known.host_to_device, "transfers.host_to_device")
        return need(known.device_to_host, "transfers.device_to_host")


Touched = Set[tuple[str, int]]
"""Weights of the base model: module and layer."""

_WRITTEN_WITH = {module: modules for modules in PRODUCTS.values() for module in modules}
"""Modules whose weights are held as one, and written as one."""


class MergeModel:
    """Seconds of switches, by one profile.

    Args:
        profile: its ``switching`` counts the weights that a switch touches; see there.
        by: whether the weights are computed anew, or a whole merged model takes the place of another.
        transfers: bring that model from the host.
    """

    def __init__(self, profile: CostProfile, by: MergeBy, transfers: TransferModel) -> None:
        self._profile = profile
        self._by = by
        self._transfers = transfers
        geometry, modules = profile.geometry, profile.lora_modules
        self._all_weights = _weights(_touched(dict.fromkeys(modules, (1,) * geometry.layers)), geometry)
        self._rank_elements = adapter_elements(dict.fromkeys(modules, (1,) * geometry.layers), geometry)

    def switch_s(self, old: AdapterRef | None, new: AdapterRef | None) -> float:
        """Return the time from ``old`` merged to ``new`` merged; None is the base model as it is.

        Raises:
            ProfileError: the profile does not know it.
        """
        if self._by is MergeBy.MODEL:
            return self._transfers.model_s()
        costs, geometry = self._profile.need(self._profile.switching, "switching"), self._profile.geometry
        touched, before = (_touched({} if each is None else each.ranks) for each in (new, old))
        seconds = costs.restore.value * _weights(before - touched, geometry) / self._all_weights
        if new is not None:
            rank = adapter_elements(new.ranks, geometry) / self._rank_elements
            seconds += costs.merge.value * _weights(touched, geometry) / self._all_weights
            seconds += costs.merge_rank.value * rank
        return seconds


def _touched(ranks: Mapping[str, tuple[int, ...]]) -> Touched:
    """Return what an adapter of these ranks has written, with what is held together with it."""
    changed = ((module, layer) for module, by_layer in ranks.items() for layer, rank in enumerate(by_layer) if rank)
    return {(each, layer) for module, layer in changed for each in _WRITTEN_WITH[module]}


def _weights(touched: Touched, geometry: ModelGeometry) -> int:
    shapes = geometry.modules
    return sum(shapes[module].in_features * shapes[module].out_features for module, _ in touched)
