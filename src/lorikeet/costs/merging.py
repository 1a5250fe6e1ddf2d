"""What it costs to have another adapter merged into the base weights than before."""

from collections.abc import Mapping, Set

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.costs.model import adapter_elements
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.transfers import TransferModel
from lorikeet.presets import MergeBy

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
