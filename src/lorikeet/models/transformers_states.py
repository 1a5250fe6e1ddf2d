"""Keeps the states of transformers' modules in the arena: of linear attention, state spaces and short convolutions.

Such a module gets a cache object of transformers, reads its state from it, and stores the new state in it. While a
model is probed, one cache records which module uses which state. In steps, each sequence of the batch runs through
the module with a cache that holds the sequence's state, so that the module's own code computes prefills and decodes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from lorikeet.core.states import STATE_BYTES, StateShape
from lorikeet.kernels.interface import Batch, Kernels
from lorikeet.kernels.states import StateSequences
from lorikeet.models.state_arena import StateArena
from lorikeet.models.transformers_attention import UnsupportedAttention
from lorikeet.models.transformers_modules import StepLora
from lorikeet.models.transformers_recurrences import ModuleStates, computing, has_functions, replace_functions

_PART_BYTES = 16 * 1024
"""Largest part of a state, where its first dimension can be divided. Smaller parts need smaller blocks."""


class StateName(NamedTuple):
    """The name of a tensor in a cache of transformers.

    Attributes:
        layer: index of the cache's layer.
        kind: ``conv`` or ``recurrent``, for the two dictionaries of a layer, or ``linear``, for MiniMax's cache.
        number: index of the state within the layer.
    """

    layer: int
    kind: str
    number: int


class KeptState(NamedTuple):
    """A tensor of state that a module uses.

    Attributes:
        name: its name in the cache.
        at: its number in ``ModelGeometry.states``.
        shape: its shape in the cache, whose first dimension is 1.
        dtype: its dtype in the cache.
    """

    name: StateName
    at: int
    shape: torch.Size
    dtype: torch.dtype


class _Layers(dict[int, LinearAttentionLayer]):
    """The layers of a cache, made when they are first used."""

    def __missing__(self, layer: int) -> LinearAttentionLayer:
        self[layer] = found = LinearAttentionLayer(number_of_states=_MOST_STATES)
        return found


_MOST_STATES = 4
"""Number of states of one kind that a layer may have."""


class SequenceCache(Cache):  # type: ignore[misc]
    """The cache of one sequence in one call of a module. Keys and values pass through it unchanged.

    Args:
        note: called with the name of each state that is read or stored.
    """

    is_sliding = (False,)
    is_compileable = False

    def __init__(self, note: Callable[[StateName], None] | None = None) -> None:
        self.layers = _Layers()
        self._linear: dict[int, Tensor] = {}
        self._note = note

    def get(self, name: StateName) -> Tensor | None:
        """Return a state; None if it was never stored."""
        if name.kind == "linear":
            return self._linear.get(name.layer)
        layer = self.layers[name.layer]
        states = layer.conv_states if name.kind == "conv" else layer.recurrent_states
        return states.get(name.number)

    def put(self, name: StateName, state: Tensor) -> None:
        """Store the state of the tokens before the call."""
        if name.kind == "linear":
            self._linear[name.layer] = state
            return
        layer = self.layers[name.layer]
        layer.device = state.device
        layer.dtype = state.dtype
        layer.has_previous_state[name.number] = True
        if name.kind == "conv":
            layer.conv_states[name.number] = state
            layer.conv_kernel_size[name.number] = state.shape[-1]
            layer.is_conv_states_initialized[name.number] = True
        else:
            layer.recurrent_states[name.number] = state
            layer.is_recurrent_states_initialized[name.number] = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values, which the attention function stores."""
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution."""
        self._used(layer_idx, "conv", state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any) -> Tensor:
        """Store new inputs of a convolution, and return them after those before."""
        self._used(layer_idx, "conv", state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **named)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state."""
        self._used(layer_idx, "recurrent", state_idx)
        layer = self.layers[layer_idx]
        return layer.recurrent_states[state_idx] if layer.is_recurrent_states_initialized[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> Tensor:
        """Store a recurrent state."""
        self._used(layer_idx, "recurrent", state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **named)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of MiniMax's linear attention."""
        self._used(layer_idx, "linear", 0)
        return self._linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store the state of MiniMax's linear attention."""
        self._used(layer_idx, "linear", 0)
        self._linear[layer_idx] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer, or any layer, has a state of earlier tokens."""
        layers = list(self.layers.values()) if layer_idx is None else [self.layers[layer_idx]]
        return any(layer.has_previous_state[state_idx or 0] for layer in layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because positions are passed explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the sizes of a mask without earlier tokens, which nothing reads."""
        return query_length, 0

    def _used(self, layer: int, kind: str, number: int) -> None:
        if self._note is not None:
            self._note(StateName(layer, kind, number))


class _NoCache(SequenceCache):
    """A cache for a module whose states the kernels keep: it has no state, and stores none."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None."""
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any) -> Tensor:
        """Return the new inputs of a convolution."""
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None."""
        return None

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> Tensor:
        """Return the state."""
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False."""
        return False


class StateProbe:
    """Records which modules of a decoder use which states.

    Args:
        decoder: the decoder.

    Attributes:
        cache: the cache to pass to the decoder.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self.cache = SequenceCache(self._note)
        self._running: list[tuple[nn.Module, int | str]] = []
        self._users: dict[StateName, dict[nn.Module, int | str]] = {}

    def begin(self, hooks: ExitStack) -> None:
        """Watch which modules get the cache."""

        def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            places: list[int | str] = [at for at, value in enumerate(given) if value is self.cache]
            places += [name for name, value in named.items() if value is self.cache]
            if places:
                self._running.append((module, places[0]))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if self._running and self._running[-1][0] is module:
                self._running.pop()

        for module in self._decoder.modules():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)

    def _note(self, name: StateName) -> None:
        if not self._running:
            raise UnsupportedAttention("it carries state from token to token outside of its modules")
        module, place = self._running[-1]
        self._users.setdefault(name, {})[module] = place

    def found(self) -> tuple[list["Mixer"], tuple[StateShape, ...]]:
        """Return the modules that use states, and the states' shapes.

        Raises:
            UnsupportedAttention: two modules share a state.
        """
        mixers: dict[nn.Module, Mixer] = {}
        shapes: list[StateShape] = []
        users = {module: place for each in self._users.values() for module, place in each.items()}
        for name, modules in self._users.items():
            state = self.cache.get(name)
            if state is None:
                continue
            if len(modules) > 1:
                raise UnsupportedAttention("several of its modules share a state")
            if state.shape[0] != 1 or not state.is_floating_point():
                raise UnsupportedAttention(f"its state has the shape {list(state.shape)}")
            (inner,) = modules
            outer = next(module for module in users if inner in set(module.modules()))
            mixer = mixers.setdefault(outer, Mixer(outer, users[outer], []))
            mixer.states.append(KeptState(name, len(shapes), state.shape, state.dtype))
            shapes.append(_shape(name, state))
        return list(mixers.values()), tuple(shapes)


class Mixer(NamedTuple):
    """A module that uses states.

    Attributes:
        module: the module.
        place: position or name of the argument that takes the cache.
        states: the states.
    """

    module: nn.Module
    place: int | str
    states: list[KeptState]

    @property
    def fits_kernels(self) -> bool:
        """Whether the kernels can keep the states: a convolution's, a recurrence's, or both."""
        kinds = [(state.name.kind, state.name.number) for state in self.states]
        return (
            len(set(kinds)) == len(kinds)
            and set(kinds) <= {("conv", 0), ("recurrent", 0)}
            and has_functions(self.module)
        )


def _shape(name: StateName, state: Tensor) -> StateShape:
    first, *rest = state.shape[1:] or (1,)
    parts = next(
        (
            parts
            for parts in range(1, first + 1)
            if first % parts == 0 and state.numel() // parts * STATE_BYTES <= _PART_BYTES
        ),
        first,
    )
    title = name.kind + (str(name.number) if name.number else "")
    return StateShape(name.layer, title, parts, (first // parts, *rest))


class StepStates:
    """The states of the running step, shared by all modules that use states.

    Args:
        shapes: the tensors of a state.
        step: the adapters of the step.
        kernels: the kernel backend.

    Attributes:
        by_kernels: whether the kernels compute convolutions and recurrences where they can, for all sequences at once.
        fit_kernels: whether the kernels can compute those of any module.
        by_token: whether modules compute further tokens of a sequence one at a time, because they start from zeros if
            they get several.
    """

    def __init__(self, shapes: Sequence[StateShape], step: StepLora, kernels: Kernels) -> None:
        self.shapes = tuple(shapes)
        self._kernels = kernels
        self._sequences: StateSequences | None = None
        self.by_kernels = False
        self.fit_kernels = False
        self._step = step
        self.by_token = False
        self._arena: StateArena | None = None
        self._key: tuple[int, torch.Size] | None = None
        self._batch: Batch | None = None
        self._rows: list[int] = []
        self._only: Callable[[int], AbstractContextManager[None]] | None = None

    @contextmanager
    def handling(
        self, arena: Tensor, batch: Batch, only: Callable[[int], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Serve the modules of one step within the context.

        Args:
            arena: the arena, ``[blocks, elements]``.
            batch: the step.
            only: returns a context in which attention is computed for one sequence of the batch.
        """
        if not self.shapes:
            yield
            return
        key = arena.data_ptr(), arena.shape
        if self._key != key:
            self._arena = StateArena(self.shapes, arena)
            self._key = key
        assert batch.host is not None
        self._batch = batch
        self._rows = batch.host.row_starts.tolist()
        self._sequences = None
        if batch.states is not None:
            self._sequences = StateSequences(batch.row_starts, batch.states.resumed, batch.host.row_starts)
        self._only = only
        try:
            yield
        finally:
            self._batch = None

    def run(self, mixer: Mixer, forward: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a module for each sequence of the step, and return its outputs for all rows."""
        batch = self._batch
        if batch is None:  # sequences are computed from their first token
            return forward(*given, **named)
        assert batch.states is not None, "a model with states got no blocks for them"
        assert self._arena is not None
        assert self._only is not None
        if self.by_kernels and mixer.fits_kernels:
            return self._run_by_kernels(mixer, forward, given, named)
        total = self._rows[-1]
        found = []
        counts: list[int] = []
        for sequence, (start, stop) in enumerate(pairwise(self._rows)):
            cache = SequenceCache()
            for state in mixer.states:
                value = self._arena.read(batch.states, state.at, sequence)
                if value is not None:
                    cache.put(state.name, value.view(state.shape).to(state.dtype))
            resumed = cache.get(mixer.states[0].name) is not None
            cuts = [*range(start, stop), stop] if self.by_token and resumed else [start, stop]
            for first, last in pairwise(cuts):
                part = [_rows_of(each, first, last, total) for each in given]
                parts = {name: _rows_of(each, first, last, total) for name, each in named.items()}
                if isinstance(mixer.place, str):
                    parts[mixer.place] = cache
                else:
                    part[mixer.place] = cache
                with self._step.only(first, last), self._only(sequence):
                    found.append(forward(*part, **parts))
                counts.append(last - first)
            for state in mixer.states:
                value = cache.get(state.name)
                assert value is not None, "a module has stored no state"
                self._arena.write(batch.states, state.at, sequence, value)
        return _joined(found, counts)

    def _run_by_kernels(
        self, mixer: Mixer, forward: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a module once for all rows."""
        assert self._arena is not None
        assert self._batch is not None
        assert self._batch.states is not None
        assert self._sequences is not None
        offsets: dict[str, Tensor] = {}
        elements: dict[str, int] = {}
        for state in mixer.states:
            offsets[state.name.kind] = self._arena.offsets(self._batch.states, state.at)
            elements[state.name.kind] = self.shapes[state.at].part_elements
        states = ModuleStates(
            self._kernels,
            self._arena.flat,
            offsets.get("conv"),
            offsets.get("recurrent"),
            elements.get("conv", 0),
            elements.get("recurrent", 0),
            self._sequences,
        )
        part: list[Any] = list(given)
        parts = dict(named)
        if isinstance(mixer.place, str):
            parts[mixer.place] = _NoCache()
        else:
            part[mixer.place] = _NoCache()
        with computing(states):
            return forward(*part, **parts)


def adapt_mixers(mixers: Sequence[Mixer], states: StepStates) -> None:
    """Make modules run with the states of the step's sequences."""
    for mixer in mixers:
        forward = mixer.module.forward
        if mixer.fits_kernels:
            replace_functions(mixer.module)
            states.fit_kernels = True

        def run(*given: Any, mixer: Mixer = mixer, forward: Callable[..., Any] = forward, **named: Any) -> Any:
            return states.run(mixer, forward, given, named)

        mixer.module.forward = run


def _rows_of(value: Any, start: int, stop: int, total: int) -> Any:
    """Return rows of a value that has all rows of a step in its second dimension; any other value unchanged."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, total):
        return value[:, start:stop]
    if isinstance(value, tuple | list) and value and all(isinstance(each, Tensor) for each in value):
        return type(value)(_rows_of(each, start, stop, total) for each in value)
    return value


def _joined(found: list[Any], counts: list[int]) -> Any:
    """Return the outputs of all sequences as one output."""
    first = found[0]
    if isinstance(first, Tensor):
        if first.dim() > 1 and first.shape[1] == counts[0]:
            return torch.cat(found, dim=1)
        raise AssertionError("a module with a state returns other rows than those of its input")
    if hasattr(first, "last_hidden_state"):
        first.last_hidden_state = torch.cat([each.last_hidden_state for each in found], dim=1)
        return first
    if isinstance(first, tuple):
        of_rows = [isinstance(each, Tensor) and each.dim() > 1 and each.shape[1] == counts[0] for each in first]
        return tuple(
            _joined([each[at] for each in found], counts) if is_of_rows else first[at]
            for at, is_of_rows in enumerate(of_rows)
        )
    raise AssertionError(f"a module with a state returns {type(first).__name__}")
