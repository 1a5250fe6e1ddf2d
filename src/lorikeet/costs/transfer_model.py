"""Predicts the costs of transfers between the memory tiers, and of merging an adapter into the base weights."""

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
    """Names the directions of the link. Transfers in different directions do not wait for each other."""

    IN = "in"
    """Copies from the host to the device."""
    OUT = "out"
    """Copies from the device to the host."""
    READ = "read"
    """Reads from an adapter's source files."""


class TransferLeg(NamedTuple):
    """Holds the seconds of a transfer in one direction, alone on the link."""

    direction: LinkDirection
    seconds: float


class TransferPath(NamedTuple):
    """The steps of a transfer.

    Attributes:
        legs: direction and time of each leg of a part, one leg after the other.
        parts: number of equal parts. While one part is on its second leg, the next part is on its first.
        groups_s: seconds of each group of blocks of a copy, in order, instead of ``parts``. Such a transfer has one
            leg.
    """

    legs: tuple[TransferLeg, ...]
    parts: int = 1
    groups_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds of the transfer without other transfers on the link."""
        if self.groups_s:
            return sum(self.groups_s)
        seconds = [leg.seconds for leg in self.legs]
        return sum(seconds) + (self.parts - 1) * max(seconds)


class TransferModel:
    """Predicts the seconds of transfers from a profile.

    Copies move whole blocks, and reads move the bytes of an adapter's weights. Under tensor parallelism all ranks move
    their parts in parallel. Blocks are blocks of the whole model.

    Args:
        profile: profile with the links.
        block_bytes: bytes of a block of the whole model.
        link_bytes_per_s: rate of a declared link (``engine.link_bytes_per_s``), which replaces both directions of each
            rank, without a fixed part; 0 for the profile's links.

    Attributes:
        profile, block_bytes: see the arguments.
    """

    def __init__(self, profile: CostProfile, block_bytes: int, link_bytes_per_s: float = 0.0) -> None:
        self.profile = profile
        self.block_bytes = block_bytes
        self._declared_bytes_per_s = link_bytes_per_s * profile.tensor_parallel

    def path(self, transfer: Transfer) -> TransferPath:
        """Return the steps of a transfer.

        A copy in groups pays a link's fixed part for each group. Weights that are loaded to the device through the host
        are read block by block, and each block is copied to the device while the next is read. Weights that use no host
        blocks are loaded in the same way if a link is declared, because all bytes reach the device over that link.
        Otherwise they are loaded directly.

        Raises:
            ProfileError: the profile lacks a link.
        """
        if transfer.groups:
            assert transfer.source is Tier.HOST, "only what lies on the host arrives in groups"
            groups_s = tuple(self.copy_s(LinkDirection.IN, stop - first) for first, stop in transfer.groups)
            return TransferPath((TransferLeg(LinkDirection.IN, sum(groups_s)),), groups_s=groups_s)
        if transfer.source is not Tier.SOURCE:
            direction = LinkDirection.IN if transfer.target is Tier.DEVICE else LinkDirection.OUT
            blocks = len(transfer.device_blocks) - transfer.kept
            return TransferPath((TransferLeg(direction, self.copy_s(direction, blocks)),))
        assert transfer.adapter is not None, "only adapters have files"
        if not (transfer.host_blocks or self._declared_bytes_per_s):
            return TransferPath((TransferLeg(LinkDirection.READ, self.source_s(transfer.adapter, Tier.DEVICE)),))
        read_s = self.source_s(transfer.adapter, Tier.HOST)
        blocks = len(transfer.device_blocks)
        if transfer.target is Tier.HOST:
            return TransferPath((TransferLeg(LinkDirection.READ, read_s),))
        copy_s = self.copy_s(LinkDirection.IN, blocks)
        return TransferPath(
            (TransferLeg(LinkDirection.READ, read_s / blocks), TransferLeg(LinkDirection.IN, copy_s / blocks)), blocks
        )

    def source_s(self, ref: AdapterRef, target: Tier) -> float:
        """Return the time to read an adapter's source files into blocks of a tier.

        Raises:
            ProfileError: the profile lacks the constant.
        """
        known = self.profile.transfers
        need = self.profile.need
        link = (
            need(known.source_to_host, "transfers.source_to_host")
            if target is Tier.HOST
            else need(known.source_to_device, "transfers.source_to_device")
        )
        geometry = self.profile.geometry
        return link.seconds(adapter_elements(ref.ranks, geometry, ref.extras) * geometry.dtype_bytes)

    def copy_s(self, direction: LinkDirection, blocks: int) -> float:
        """Return the time to copy this many blocks between the tiers.

        Raises:
            ProfileError: the profile lacks the link, and no link is declared.
        """
        return self.link(direction).seconds(blocks * self.block_bytes)

    def model_s(self) -> float:
        """Return the time to load a whole base model from the host to the device.

        Raises:
            ProfileError: the profile lacks the model's size, or it lacks the link and none is declared.
        """
        return self.link(LinkDirection.IN).seconds(self.profile.need(self.profile.weight_bytes, "weight_bytes"))

    def link(self, direction: LinkDirection) -> Link:
        """Return the link between the tiers in one direction.

        Raises:
            ProfileError: the profile lacks the link, and none is declared.
        """
        if self._declared_bytes_per_s:
            return Link(Constant(0.0, "s"), Constant(self._declared_bytes_per_s, "bytes/s"))
        known = self.profile.transfers
        need = self.profile.need
        if direction is LinkDirection.IN:
            return need(known.host_to_device, "transfers.host_to_device")
        return need(known.device_to_host, "transfers.device_to_host")


Touched = Set[tuple[str, int]]
"""Weights of the base model, by module and layer."""

_WRITTEN_WITH = {module: modules for modules in PRODUCTS.values() for module in modules}
"""Modules whose weights are in one tensor, so that they are written together."""


class MergeModel:
    """Predicts the seconds of switching the merged adapter from a profile.

    Args:
        profile: profile with ``switching`` costs.
        by: the way to switch: the weights are recomputed, or a whole merged model replaces another.
        transfers: predicts the load of that model from the host.
    """

    def __init__(self, profile: CostProfile, by: MergeBy, transfers: TransferModel) -> None:
        self._profile = profile
        self._by = by
        self._transfers = transfers
        geometry = profile.geometry
        modules = profile.lora_modules
        self._all_weights = _weights(_touched(dict.fromkeys(modules, (1,) * geometry.layers)), geometry)
        self._rank_elements = adapter_elements(dict.fromkeys(modules, (1,) * geometry.layers), geometry)

    def switch_s(self, old: AdapterRef | None, new: AdapterRef | None) -> float:
        """Return the time to switch the merged adapter from ``old`` to ``new``; None is the base model.

        Raises:
            ProfileError: the profile lacks the constant.
        """
        if self._by is MergeBy.MODEL:
            return self._transfers.model_s()
        costs = self._profile.need(self._profile.switching, "switching")
        geometry = self._profile.geometry
        touched, before = (_touched({} if each is None else each.ranks) for each in (new, old))
        seconds = costs.restore.value * _weights(before - touched, geometry) / self._all_weights
        if new is not None:
            rank = adapter_elements(new.ranks, geometry) / self._rank_elements
            seconds += costs.merge.value * _weights(touched, geometry) / self._all_weights
            seconds += costs.merge_rank.value * rank
        return seconds


def _touched(ranks: Mapping[str, tuple[int, ...]]) -> Touched:
    """Return the number of weights that a merge writes, including all weights of the same tensors."""
    changed = ((module, layer) for module, by_layer in ranks.items() for layer, rank in enumerate(by_layer) if rank)
    return {(each, layer) for module, layer in changed for each in _WRITTEN_WITH.get(module, ())}


def _weights(touched: Touched, geometry: ModelGeometry) -> int:
    shapes = geometry.modules
    return sum(shapes[module].in_features * shapes[module].out_features for module, _ in touched)
