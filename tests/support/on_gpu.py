"""The Triton kernels on a GPU, for tests whose tensors lie on the host."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.kernels.interface import Batch, HeadNorms, Rotation, Weight
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraWeights
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import StateSequences
from lorikeet.kernels.triton.kernels import TritonKernels
from lorikeet.kernels.triton.launch import INTERPRETED

GPU = torch.device("cuda")


class OnGpu(TritonKernels):
    """Copies arguments to the GPU, computes there, and copies results and changed arguments back."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Compute on the GPU; adapters are copied there."""
        assert isinstance(weight, Tensor | QuantizedWeight)
        if delta is not None:
            delta = delta._replace(lora=_lora_there(delta.lora))
        return super().linear(_there(x), weight.to(GPU), None if bias is None else bias.to(GPU), delta).cpu()

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Compute on the GPU."""
        own = x.to(GPU)
        found = super().add_norm(own, None if delta is None else delta.to(GPU), weight.to(GPU), eps, offset)
        x.copy_(own)
        return found.cpu()

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Compute on the GPU."""
        own, own_kv = _there(qkv), _there(kv)
        if norms is not None:
            norms = norms._replace(q=norms.q.to(GPU), k=norms.k.to(GPU))
        there = rotation._replace(cos=rotation.cos.to(GPU), sin=rotation.sin.to(GPU))
        super().rotary_store(own, there, own_kv, _batch_there(batch), norms)
        qkv.copy_(own)
        kv.copy_(own_kv)

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Compute on the GPU."""
        return super().attention(_there(qkv), _there(kv), _batch_there(batch), scale, window, softcap).cpu()

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute on the GPU."""
        return super().silu_mul(gate_up.to(GPU)).cpu()

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute on the GPU."""
        return super().gelu_mul(gate_up.to(GPU)).cpu()

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Compute on the GPU."""
        own = tails.to(GPU)
        bias = None if bias is None else bias.to(GPU)
        found = super().causal_conv(
            _there(x), weight.to(GPU), bias, own, offsets.to(GPU), _sequences_there(sequences), has_silu=has_silu
        )
        tails.copy_(own)
        return found.cpu()

    def recurrence(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        skip: Tensor | None = None,
        *,
        is_delta: bool,
    ) -> Tensor:
        """Compute on the GPU."""
        own = states.to(GPU)
        parts = (_there(each) for each in (queries, keys, values, decay, beta))
        skip = None if skip is None else skip.to(GPU)
        found = super().recurrence(*parts, own, offsets.to(GPU), _sequences_there(sequences), skip, is_delta=is_delta)
        states.copy_(own)
        return found.cpu()

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
    ) -> Tensor:
        """Compute on the GPU."""
        return (
            super().gated_norm(_there(x), _there(gate), weight.to(GPU), eps, group, is_norm_first=is_norm_first).cpu()
        )

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Compute on the GPU."""
        return super().choose(logits.to(GPU), parameters.on(GPU)).cpu()


def _there(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides: kernels must do with those of views."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
    return copy.copy_(tensor)


def _sequences_there(sequences: StateSequences) -> StateSequences:
    there = {name: getattr(sequences, name).to(GPU) for name in ("row_starts", "resumed")}
    return sequences._replace(**there)


def _batch_there(batch: Batch) -> Batch:
    names = ("slot_blocks", "slot_offsets", "row_starts", "contexts", "block_tables")
    return replace(batch, **{name: getattr(batch, name).to(GPU) for name in names})


def _lora_there(lora: LoraBatch) -> LoraBatch:
    moved: dict[int, LoraWeights] = {}
    for segment in lora.segments:
        if id(segment.weights) not in moved:
            moved[id(segment.weights)] = _weights_there(segment.weights)
    return LoraBatch([segment._replace(weights=moved[id(segment.weights)]) for segment in lora.segments], lora.form)


def _weights_there(weights: LoraWeights) -> LoraWeights:
    to = partial(Tensor.to, device=GPU)
    pieces = {key: tuple((to(a), to(b)) for a, b in held) for key, held in weights.pieces.items()}
    return LoraWeights(pieces, (len(weights.index) - 1) // len(LORA_MODULES))


def triton_kernels() -> TritonKernels:
    """Return the kernels that tests on the host can call: interpreted, or on a GPU."""
    return TritonKernels() if INTERPRETED else OnGpu()
