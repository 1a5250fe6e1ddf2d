"""Computes recurrences and convolutions of transformers' modules by our kernels, for all sequences of a step at once.

A module with linear attention, a state space or a short convolution calls such functions by their names in its file.
There they are replaced by functions that use the kernels, while a step runs through a module whose states the kernels
can keep. All other code of the module, and its linear layers with their adapters, processes all rows of the step.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.states import StateSequences
from lorikeet.models.transformers_attention import UnsupportedAttention

_ACTIVATIONS = {None: False, "silu": True, "swish": True}


class ModuleStates(NamedTuple):
    """The states of one module, for the sequences of a step.

    Attributes:
        kernels: the kernel backend.
        flat: the arena, fp32.
        conv, recurrent: int64 ``[sequences, parts]``, where the parts begin in ``flat``; None without such a state.
        conv_elements, recurrent_elements: number of elements of a part.
        sequences: rows of the sequences.
    """

    kernels: Kernels
    flat: Tensor
    conv: Tensor | None
    recurrent: Tensor | None
    conv_elements: int
    recurrent_elements: int
    sequences: StateSequences


_RUNNING: ContextVar[ModuleStates | None] = ContextVar("running", default=None)
"""The states of the module that runs in this thread; None outside of :func:`computing`."""


@contextmanager
def computing(states: ModuleStates) -> Iterator[None]:
    """Compute the functions of a module by kernels within the context."""
    token = _RUNNING.set(states)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def _running() -> ModuleStates:
    states = _RUNNING.get()
    assert states is not None, "no module runs"
    return states


def _rows(x: Tensor) -> Tensor:
    """Return ``x [1, T, …]`` without its first dimension. A row is contiguous."""
    rows = x[0]
    return rows if rows[0].is_contiguous() else rows.contiguous()


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Compute ``causal_conv1d_fn``: ``hidden_states [1, channels, T]``, ``weight [channels, taps]``."""
    states = _running()
    channels, taps = weight.shape
    if (
        states.conv is None
        or activation not in _ACTIVATIONS
        or states.conv_elements * states.conv.shape[1] < channels * (taps - 1)
    ):
        raise UnsupportedAttention("its convolution is not one that the kernels compute")
    x = _rows(hidden_states.transpose(1, 2))
    by_tap = weight.T.to(x.dtype).contiguous()
    out = states.kernels.causal_conv(
        x, by_tap, bias, states.flat, states.conv, states.sequences, has_silu=_ACTIVATIONS[activation]
    )
    return out.T[None]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,  # transformers' signature
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute ``torch_chunk_gated_delta_rule``: all tensors are ``[1, T, heads, …]``."""
    if not use_qk_l2norm_in_kernel:
        raise UnsupportedAttention("its queries and keys are not normalised")
    return _recurrence(query, key, value, g[0].float(), beta[0].float(), None, is_delta=True)[None], None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # transformers' names
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """Compute ``mamba2_chunk_scan``: inputs ``[1, T, heads, head_dim]``, B and C ``[1, T, groups, state]``."""
    if z is not None:
        raise UnsupportedAttention("its state space has a gate of its own")
    step = dt[0].float()
    if dt_bias is not None:
        step = step + dt_bias.float()
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(*dt_limit)
    skip = None if D is None else D.float()
    out = _recurrence(C, B, hidden_states, step * A.float(), step, skip, is_delta=False)[None]
    return (out, None) if return_final_states else out


def _recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    *,
    is_delta: bool,
) -> Tensor:
    states = _running()
    q, k, v = (_rows(each) for each in (queries, keys, values))
    head_elements = k.shape[2] * v.shape[2]
    if states.recurrent is None or states.recurrent_elements * states.recurrent.shape[1] != v.shape[1] * head_elements:
        raise UnsupportedAttention("its state is not one that the kernels keep")
    # A part may contain several heads.
    within = torch.arange(states.recurrent_elements // head_elements, device=states.flat.device) * head_elements
    offsets = (states.recurrent[:, :, None] + within).flatten(1)
    return states.kernels.recurrence(
        q, k, v, decay.contiguous(), beta.contiguous(), states.flat, offsets, states.sequences, skip, is_delta=is_delta
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
"""The functions that the kernels compute, by their names in transformers."""


def has_functions(module: nn.Module) -> bool:
    """Return whether the file of a module has any of the functions."""
    return not _FUNCTIONS.keys().isdisjoint(vars(sys.modules[type(module).__module__]))


def replace_functions(module: nn.Module) -> None:
    """Replace the functions in the file of a module. Outside of :func:`computing` they are as before."""
    file = vars(sys.modules[type(module).__module__])
    for name in _FUNCTIONS.keys() & file.keys():
        if not hasattr(file[name], "by_torch"):
            file[name] = _replaced(file[name], _FUNCTIONS[name])


def _replaced(by_torch: Callable[..., Any], by_kernels: Callable[..., Any]) -> Callable[..., Any]:
    def function(*given: Any, **named: Any) -> Any:
        return (by_torch if _RUNNING.get() is None else by_kernels)(*given, **named)

    function.by_torch = by_torch  # type: ignore[attr-defined]
    return function


def replace_gated_norm(module: nn.Module, kernels: Kernels) -> None:
    """Compute a gated RMS norm by its kernel, if the module is one: it gives the same results on random rows."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if "RMSNormGated" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return
    group = getattr(module, "group_size", len(weight))
    rows, gate = torch.randn(2, 4, len(weight), generator=torch.Generator().manual_seed(1)).to(weight) * 2
    by_torch = module.forward
    expected = by_torch(rows.clone(), gate.clone())
    for is_norm_first in (True, False):

        def forward(hidden_states: Tensor, gate: Tensor | None = None, *, is_first: bool = is_norm_first) -> Tensor:
            if gate is None:
                return by_torch(hidden_states)
            x, opened = (each.reshape(-1, len(weight)) for each in (hidden_states, gate))
            found = kernels.gated_norm(x, opened, weight, eps, group, is_norm_first=is_first)
            return found.view(hidden_states.shape)

        found = forward(rows.clone(), gate.clone())
        tolerance = 0.05 if weight.dtype == torch.bfloat16 else 1e-4
        if found.dtype == expected.dtype and torch.allclose(found, expected, atol=tolerance, rtol=tolerance):
            module.forward = forward
            return
