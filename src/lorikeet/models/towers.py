"""Turns images into embeddings by a model's own vision tower and projector, which are modules of transformers.

The module of transformers that holds both the tower and the language model embeds the tokens, computes the images,
puts their embeddings in the place of the placeholders, and then calls its language model. Here another module stands
in the language model's place, and records what it is called with. So every family's way of projecting, arranging and
merging is transformers' own code.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lorikeet.core.geometry import TowerModules
from lorikeet.core.images import ImageTensor, PromptImage
from lorikeet.kernels.devices import to_device
from lorikeet.models.image_features import NO_CHANGES, ImageFeatures, TowerChanges, TowerError, TowerLora
from lorikeet.models.transformers_modules import replaced

_PIXELS = "pixel_values"
_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
"""Arguments that name the placeholders: 1 for a placeholder of an image, 0 for text."""
LAYER_EMBEDS = "deepstack_visual_embeds"
"""The language model's argument with embeddings that are added to the outputs of its first layers."""
ROWS_OF_IMAGES = "visual_pos_masks"
"""The language model's argument with the rows of these embeddings, bool ``[1, T]``."""
_UNDERSTOOD = frozenset(
    {
        LAYER_EMBEDS, ROWS_OF_IMAGES, "attention_mask", "cache_position", "input_ids", "inputs_embeds", "labels",
        "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "per_layer_inputs", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip
"""Arguments of language models that are served, or do not depend on images."""
_PROBE_TOKENS = 7
_PROBE_IMAGE = slice(2, 5)
"""Tokens of the prompt that shows what placeholders see."""


class _Embedding(nn.Module):
    """Embeds the tokens of a prompt as NaN, so that the rows that a model replaces show.

    Models that turn images into tokens (Chameleon, Emu3) embed these after the prompt, and get their own embeddings.

    Args:
        embedding: the language model's embedding.

    Attributes:
        is_used: whether the prompt was embedded.
    """

    _embedding: nn.Embedding | None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight[:1, :1].new_full((1, 1), torch.nan).expand(embedding.weight.shape)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self.is_used = False
        object.__setattr__(self, "_embedding", embedding)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return embeddings ``[..., hidden]``, NaN in the first call."""
        if self.is_used and self._embedding is not None:
            found: Tensor = self._embedding(token_ids)
            return found
        self.is_used = True
        return self.weight.new_full((*token_ids.shape, self.embedding_dim), torch.nan)

    def free(self) -> None:
        """Leave the language model's embedding, so that every token becomes NaN."""
        self._embedding = None


class _LanguageModel(nn.Module):
    """Stands in the place of a language model, and records the arguments of the call."""

    def __init__(self, replaced: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.config = getattr(replaced, "config", None)
        self.embed_tokens = _Embedding(embedding)
        self.called: dict[str, Any] = {}
        object.__setattr__(self, "model", self)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.embed_tokens

    def get_per_layer_inputs(self, *_: Any, **__: Any) -> None:
        """Return nothing, since the language model's own embeddings by layer do not depend on images."""

    def forward(self, *_: Any, **given: Any) -> Any:
        """Record the arguments."""
        self.called = given
        return _Output()


class _Output:
    """The output of a language model that computes nothing."""

    def __getitem__(self, index: Any) -> Any:
        return torch.zeros(1, 1, 1)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _takes_lora(module: nn.Module) -> bool:
    """Return whether LoRA is supported on a module."""
    is_convolution = type(module) in _CONVOLUTIONS and module.groups == 1 and module.padding_mode == "zeros"
    return is_convolution or type(module) is nn.Linear


_CONVOLUTIONS = {
    nn.Conv1d: nn.functional.conv1d,
    nn.Conv2d: nn.functional.conv2d,
    nn.Conv3d: nn.functional.conv3d,
}


def _add_lora(lora: TowerLora, module: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return a module's output with the delta of LoRA."""
    (x,) = given
    x = x.to(lora.a.dtype)
    if type(module) is nn.Linear:
        return output + nn.functional.linear(nn.functional.linear(x, lora.a), lora.b, lora.bias)
    convolve = _CONVOLUTIONS[type(module)]
    inner = convolve(x, lora.a, None, module.stride, module.padding, module.dilation)
    return output + convolve(inner, lora.b, lora.bias)


class Tower:
    """The vision tower and projector of a model.

    Args:
        whole: the module of transformers that holds the tower and the language model. It is not changed.
        path: the module's name in the model; "" for the model itself.
        name: name of the language model in it.
        embedding: the language model's embedding of tokens.

    Attributes:
        sees_whole_images: whether a placeholder sees the later placeholders of its image.
        sees_whole_prompt: whether all tokens of a prompt with an image see each other.
        blind_layers: types of the layers in which no token sees later ones.
    """

    def __init__(self, whole: PreTrainedModel, path: str, name: str, embedding: nn.Embedding) -> None:
        self._prefix = f"{path}." if path else ""
        self._name = name
        self._whole = copy.copy(whole)
        self._whole._modules = dict(whole._modules)
        self._language = _LanguageModel(getattr(whole, name), embedding)
        self._whole._modules[name] = self._language
        self._accepted = inspect.signature(type(whole).forward).parameters
        self._dtype = embedding.weight.dtype
        self._device = embedding.weight.device
        self.sees_whole_images, self.sees_whole_prompt, self.blind_layers = self._probe()

    @classmethod
    def of(cls, model: PreTrainedModel, decoder: nn.Module) -> "Tower":
        """Return the tower of a model.

        Args:
            model: a model with an output layer.
            decoder: its decoder.

        Raises:
            TowerError: the model takes no images, or in a way that is not supported.
        """
        if _PIXELS in inspect.signature(type(decoder).forward).parameters:
            raise TowerError(f"{type(model).__name__} has no language model apart from its vision tower")
        path = next(name for name, module in model.named_modules() if module is decoder).split(".")
        embedding = model.get_input_embeddings()
        for depth in range(len(path) - 1, -1, -1):
            above = ".".join(path[:depth])
            whole = model.get_submodule(above)
            takes_pixels = _PIXELS in inspect.signature(type(whole).forward).parameters
            if isinstance(whole, PreTrainedModel) and takes_pixels and isinstance(embedding, nn.Embedding):
                if getattr(whole.config, "visual_indicator_token_ids", None):
                    raise TowerError("it also replaces the tokens around its images")
                found = cls(whole, above, path[depth], embedding)
                if found._placeholder < 0:
                    raise TowerError("its config names no token that stands for images")
                return found
        raise TowerError(f"{type(model).__name__} does not replace tokens by embeddings of images")

    def free_embedding(self) -> None:
        """Leave the language model's embedding, so that its memory can be freed."""
        self._language.embed_tokens.free()

    def select_attention(self) -> None:
        """Select attention for the tower's modules, after the language model's was selected for the whole model."""
        for module in self._whole.modules():
            if isinstance(module, PreTrainedModel) and module is not self._whole:
                module.config._attn_implementation_internal = "sdpa" if module._supports_sdpa else "eager"

    @property
    def sizes(self) -> tuple[int, bool, bool]:
        """Bytes of the embeddings of one token, and whether tokens see later ones of their image or of the prompt."""
        config = getattr(self._whole.config, "vision_config", None)
        layers = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
        token_bytes = layers * self._language.embed_tokens.embedding_dim * self._dtype.itemsize
        return token_bytes, self.sees_whole_images, self.sees_whole_prompt

    @property
    def modules(self) -> TowerModules:
        """The parts that adapters may change."""
        parts = [f"{name}." for name, _ in self._whole.named_children() if name != self._name]
        own = {name: each for name, each in self._whole.named_parameters() if name.startswith(tuple(parts))}
        adaptable = frozenset(name for name, module in self._whole.named_modules() if _takes_lora(module))
        shapes = {name: tuple(each.shape) for name, each in own.items()}
        return TowerModules(self._prefix, tuple(parts), shapes, adaptable)

    @torch.inference_mode()
    def encode(
        self, token_ids: Sequence[int], tensors: Mapping[str, ImageTensor], changes: TowerChanges = NO_CHANGES
    ) -> ImageFeatures:
        """Compute the embeddings of one image.

        Args:
            token_ids: the tokens of the image, from its first placeholder to its last.
            tensors: the processor's tensors of the image.
            changes: the changes of an adapter to the tower.

        Raises:
            TowerError: the tensors do not fit the model or the placeholders.
        """
        ids = to_device(torch.tensor([list(token_ids)]), self._device)
        given = self._tensors(tensors)
        if _PIXELS not in given:
            raise TowerError(f"the processor gave {', '.join(sorted(tensors)) or 'nothing'}, and no {_PIXELS}")
        with self._changed(changes):
            self._call(input_ids=ids, position_ids=torch.zeros_like(ids), **{**self._token_types(ids), **given})
        called = self._language.called
        self._language.called = {}
        found = called.get("inputs_embeds")
        if not isinstance(found, Tensor) or found.shape[:2] != ids.shape:
            raise TowerError("the model does not call its language model with embeddings")
        if others := sorted(name for name, value in called.items() if value is not None and name not in _UNDERSTOOD):
            raise TowerError(f"its language model takes {', '.join(others)} beside embeddings, which is not supported")
        are_replaced = ~found[0, :, 0].isnan()
        rows = are_replaced.nonzero()[:, 0]
        if not len(rows):
            raise TowerError("the model has put no embeddings in the place of the placeholders")
        layers = tuple(each.to(self._dtype) for each in called.get(LAYER_EMBEDS) or ())
        return ImageFeatures(rows.cpu(), found[0, rows].to(self._dtype), layers)

    @torch.inference_mode()
    def positions(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> Tensor | None:
        """Return the positions of a prompt's tokens on each axis, int64 ``[axes, tokens]``; None if there is one axis.

        Args:
            token_ids: tokens of the prompt.
            images: its images, in order.
        """
        if not hasattr(self._whole, "get_rope_index"):
            return None
        ids = to_device(torch.tensor([list(token_ids)]), self._device)
        named: dict[str, list[Tensor]] = {}
        for image in images:
            for name, tensor in image.tensors.items():
                if not name.startswith(_PIXELS) and name in self._accepted and name not in _TOKEN_TYPES:
                    named.setdefault(name, []).append(self._tensor(tensor))
        kinds = self._token_types(ids)
        self._whole.rope_deltas = None
        if "attention_mask" in self._accepted:  # Models of several senses compute no positions without it.
            kinds["attention_mask"] = torch.ones_like(ids)
        self._call(input_ids=ids, **kinds, **{name: torch.cat(each) for name, each in named.items()})
        found = self._language.called.get("position_ids")
        self._language.called = {}
        if not isinstance(found, Tensor) or found.dim() != 3:
            raise TowerError("the model computes no positions of its placeholders")
        return found[:, 0].long().cpu()

    def blocks_seen(
        self, token_ids: npt.NDArray[np.int64], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, int], ...]:
        """Return the ranges of a prompt, as (start, stop), in which each token sees the whole range.

        Raises:
            TowerError: a range is longer than the window of a layer.
        """
        if self.sees_whole_prompt:
            return ((0, len(token_ids)),)
        if not self.sees_whole_images:
            return ()
        bounds = np.diff(np.concatenate(([0], token_ids == self._placeholder, [0])))
        found = tuple(zip((bounds == 1).nonzero()[0].tolist(), (bounds == -1).nonzero()[0].tolist(), strict=True))
        window = getattr(self._whole.config.get_text_config(decoder=True), "sliding_window", None)
        longest = max((stop - start for start, stop in found), default=0)
        if window and longest > window and not self.blind_layers:  # Tokens of an image see it beyond the window, too.
            raise TowerError(f"an image of {longest} tokens exceeds the model's window of {window} tokens")
        return found

    @contextmanager
    def _changed(self, changes: TowerChanges) -> Iterator[None]:
        """Apply the changes of an adapter within the context."""
        with ExitStack() as stack:
            for name, parameters in changes.parameters.items():
                stack.enter_context(replaced(self._whole.get_submodule(name), parameters))
            for name, lora in changes.lora.items():
                hook = self._whole.get_submodule(name).register_forward_hook(partial(_add_lora, lora))
                stack.callback(hook.remove)
            yield

    def _token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments that mark placeholders, for a model that takes them."""
        marks = (ids == self._placeholder).long()
        return {name: marks for name in _TOKEN_TYPES if name in self._accepted}

    @property
    def _placeholder(self) -> int:
        config = self._whole.config
        named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
        return next((int(each) for each in named if each is not None), -1)

    def _tensors(self, tensors: Mapping[str, ImageTensor]) -> dict[str, Tensor]:
        return {name: self._tensor(each) for name, each in tensors.items() if name in self._accepted}

    def _tensor(self, tensor: ImageTensor) -> Tensor:
        dtype = getattr(torch, tensor.dtype)
        found = torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)
        return to_device(found.to(self._dtype) if found.is_floating_point() else found, self._device)

    def _call(self, **given: Any) -> None:
        """Call the module of tower and language model.

        Raises:
            TowerError: the module fails.
        """
        self._language.called = {}
        self._language.embed_tokens.is_used = False
        try:
            self._whole(**given, use_cache=False)
        except Exception as error:  # The exception may be of any kind, since it comes from the model's code.
            raise TowerError(f"{type(self._whole).__name__} fails: {error}") from error

    @torch.inference_mode()
    def _probe(self) -> tuple[bool, bool, frozenset[str]]:
        """Find out what the tokens of a prompt with an image see, from the masks for the language model."""
        ids = torch.ones(1, _PROBE_TOKENS, dtype=torch.int64, device=self._device)
        ids[0, _PROBE_IMAGE] = self._placeholder
        nothing = False, False, frozenset[str]()
        if self._placeholder < 0:
            return nothing
        try:
            self._call(input_ids=ids, **self._token_types(ids))
        except TowerError:
            return nothing
        mask = self._language.called.get("attention_mask")
        masks = mask if isinstance(mask, dict) else {"": mask}
        seen = {name: each[0, 0] == 0 for name, each in masks.items() if isinstance(each, Tensor) and each.dim() == 4}
        later = torch.ones(_PROBE_TOKENS, _PROBE_TOKENS, dtype=torch.bool, device=self._device).triu(1)
        inside = torch.zeros_like(later)
        inside[_PROBE_IMAGE, _PROBE_IMAGE] = True
        outside = any(bool((each & later & ~inside).any()) for each in seen.values())
        blind = frozenset(name for name in masks if name not in seen or not bool((seen[name] & later).any()))
        return any(bool((each & later & inside).any()) for each in seen.values()), outside, blind
