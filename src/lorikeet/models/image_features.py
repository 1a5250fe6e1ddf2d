"""The embeddings of images, as a tower computes them and batches use them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lorikeet.core.geometry import TowerModules
from lorikeet.core.images import ImageTensor, PromptImage


class TowerError(ValueError):
    """Raised when a tower cannot compute an image. The message names the reason."""


class ImageFeatures(NamedTuple):
    """The tensors that stand for an image in the language model.

    Attributes:
        rows: int64 ``[n]`` on the host, the tokens whose embeddings are replaced, counted from the first placeholder.
        embeds: ``[n, hidden]``, their embeddings.
        layers: ``[n, hidden]`` each, added to the rows' outputs of the first decoder layers.
    """

    rows: Tensor
    embeds: Tensor
    layers: tuple[Tensor, ...] = ()


class TowerLora(NamedTuple):
    """The LoRA of a linear layer or convolution of a tower.

    Attributes:
        a: ``[rank, in]``, or ``[rank, in, *kernel]`` of a convolution.
        b: ``[out, rank]``, or ``[out, rank, 1, …]``, multiplied by the scaling.
        bias: ``[out]``, multiplied by the scaling; None without one.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None


class TowerChanges(NamedTuple):
    """The changes of an adapter to a tower, by the names of ``core.geometry.TowerModules``.

    Attributes:
        lora: LoRA by module.
        parameters: whole parameters by module and name.
    """

    lora: Mapping[str, TowerLora]
    parameters: Mapping[str, Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        whole = sum(each.nbytes for of_module in self.parameters.values() for each in of_module.values())
        return whole + sum(each.nbytes for lora in self.lora.values() for each in lora if each is not None)


NO_CHANGES = TowerChanges({}, {})


class SeesImages(Protocol):
    """Computes what stands for images in a language model; see ``models.towers``."""

    @property
    def sizes(self) -> tuple[int, bool, bool]:
        """Bytes of the embeddings of one token, and whether tokens see later ones of their image or of the prompt."""
        ...

    @property
    def modules(self) -> TowerModules:
        """The parts that adapters may change."""
        ...

    def encode(
        self, token_ids: Sequence[int], tensors: Mapping[str, ImageTensor], changes: TowerChanges = NO_CHANGES
    ) -> ImageFeatures:
        """Compute the embeddings of an image from its tokens and tensors, with an adapter's changes.

        Raises:
            TowerError: the tensors do not fit the model or the placeholders.
        """
        ...

    def positions(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> Tensor | None:
        """Return the positions of a prompt's tokens, int64 ``[axes, tokens]``; None if they are counted from 0.

        Raises:
            TowerError: the model cannot compute them.
        """
        ...

    def blocks_seen(
        self, token_ids: npt.NDArray[np.int64], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, int], ...]:
        """Return the ranges of a prompt, as (start, stop), in which each token sees the whole range."""
        ...
