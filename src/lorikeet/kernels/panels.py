"""Weights as the native kernels want them."""

import torch
from torch import Tensor


class PanelWeight:
    """A weight packed in panels (``native/linear_tiles.h``), which stay where they are when the weight changes.

    Attributes:
        shape: ``[out, in]``.
        outputs: the first of them.
        panels: their elements.
        address: of int64 ``[4]``: address of the panels, inputs, outputs, bytes of an element.
    """

    def __init__(self, panels: Tensor, shape: torch.Size) -> None:
        self.shape = shape
        self.outputs, inputs = shape
        self.panels = panels
        numbers = [panels.data_ptr(), inputs, self.outputs, panels.element_size()]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self.address = self._numbers.data_ptr()
