"""Keeps the changes of adapters to the vision tower, which steps that compute images apply."""

from collections import OrderedDict

import torch
from torch import Tensor

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.weights import load_tower
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.kernels.devices import to_device
from lorikeet.models.image_features import NO_CHANGES, TowerChanges, TowerError, TowerLora

_KEPT_BYTES = 256 * 2**20
"""Bytes of changes that are kept for later images. Those of one image may exceed it."""


class TowerAdapters:
    """Reads the changes of adapters to the tower when an image first needs them.

    Args:
        geometry: sizes of the model.
        dtype, device: dtype and device of the tower.
    """

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._device = device
        self._kept: OrderedDict[AdapterDigest, TowerChanges] = OrderedDict()

    def changes(self, ref: AdapterRef | None) -> TowerChanges:
        """Return the changes of an adapter; none without one.

        Raises:
            TowerError: the adapter's files are missing or have changed.
        """
        if ref is None:
            return NO_CHANGES
        found = self._kept.pop(ref.digest, None)
        if found is None:
            try:
                found = self._read(ref)
            except AdapterError as error:
                raise TowerError(str(error)) from error
        self._kept[ref.digest] = found
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def _read(self, ref: AdapterRef) -> TowerChanges:
        sides: dict[str, dict[str, Tensor]] = {}
        parameters: dict[str, dict[str, Tensor]] = {}
        for each, values in load_tower(ref, self._geometry, str(self._dtype).removeprefix("torch.")):
            tensor = to_device(torch.from_numpy(values).view(self._dtype), self._device)
            of_lora = each.kind in ("a", "b", "lora_bias")
            (sides if of_lora else parameters).setdefault(each.module, {})[each.kind] = tensor
        lora = {module: TowerLora(each["a"], each["b"], each.get("lora_bias")) for module, each in sides.items()}
        return TowerChanges(lora, parameters)
