"""All layers in one native call give the same bits as single kernels."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.extra_weights import ExtraMatrix, ExtraWeights
from lorikeet.kernels.interface import Kernels, LayersShape, LayerWeights
from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraWeights
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets
from lorikeet.models.architectures import LLAMA_NORMS
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.weights import pack_weights
from tests.models.arenas import Arena
from tests.models.checkpoints import VARIANTS, make_checkpoint

DTYPES = (torch.bfloat16, torch.float32)
FORM = KernelForm.UNPADDED


class OneByOne(NativeKernels):
    """Called kernel by kernel."""

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> None:
        """Nothing."""


class Counting(NativeKernels):
    """Counts its calls of kernels that a layer is made of."""

    calls = 0

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Counted."""
        self.calls += 1
        return super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Counted."""
        self.calls += 1
        return super().gelu_mul(gate_up)


def adapter(config: ModelConfig, rank: int, modules: Sequence[str], dtype: torch.dtype) -> LoraWeights:
    """Return random weights of these modules on all layers but the first."""
    generator = torch.Generator().manual_seed(rank)
    shapes = config.module_shapes()
    geometry = config.geometry(dtype.itemsize)
    pieces = {
        (layer, module): (
            (
                (torch.randn(rank, shapes[module].in_features, generator=generator) * 0.2).to(dtype),
                (torch.randn(rank, shapes[module].out_features, generator=generator) * 0.2).to(dtype),
            ),
        )
        for layer in range(1, config.layers)
        for module in modules
        if geometry.has_module(layer, module)
    }
    return LoraWeights(pieces, config.layers, tuple(shapes))


def extras_of(config: ModelConfig, dtype: torch.dtype) -> ExtraWeights:
    """Return random factors and summands of some outputs, and norms."""
    generator = torch.Generator().manual_seed(9)
    outputs = {module: shape.out_features for module, shape in config.module_shapes().items()}
    scaled = ("q", "v", "o", "up", "recurrence_k", "recurrence_a", "recurrence_o")
    shifted = ("v", "gate", "down", "recurrence_z")
    geometry = config.geometry(dtype.itemsize)
    sizes = {
        (kind, layer, module): outputs[module]
        for kind, modules in (("scale", scaled), ("shift", shifted))
        for layer in range(1, 3)
        for module in modules
        if geometry.has_module(layer, module)
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    sizes |= {("vector", layer, f"layers.{{}}.{name}.weight"): config.hidden_size for layer in (0, 2) for name in norms}
    matrices = {key: ExtraMatrix((torch.rand(1, n, generator=generator).to(dtype),)) for key, n in sizes.items()}
    extras = ExtraWeights(matrices, geometry)
    extras.is_prepared = True
    return extras


def forward_steps(
    folder: Path, kernels: Kernels, dtype: torch.dtype, form: KernelForm | None, *, has_extras: bool = False
) -> list[Tensor]:
    """Return logits, and what lies in KV, of prefills and decodes beside each other, some rows of which sample.

    Two adapters of different ranks and modules run beside the base; the last row that samples may be under either.
    """
    config = read_model_config(folder)
    decoder = Decoder(config, pack_weights(load_weights(folder, config, dtype), kernels), kernels, SingleRankGroup())
    arena = Arena.make(config, decoder, dtype=dtype)
    kv = arena.kv.nan_to_num_(0)
    every = adapter(config, 5, tuple(config.module_shapes()), dtype)
    some = adapter(config, 12, ("q", "v"), dtype)
    if has_extras:
        some.extras = extras_of(config, dtype)
    found = []
    # Each is a step: what is appended, where the segments of the two adapters begin and end, and which rows sample.
    steps = (
        ([("a", [5, 6, 7, 8, 9]), ("b", [3, 4, 5, 6]), ("c", [2])], (5, 9, 10), [4, 9]),
        ([("a", [1]), ("b", [2, 3])], (0, 1, 3), []),
        ([("a", [4]), ("c", list(range(9, 29)))], (0, 1, 21), [20, 0]),
        ([("a", [8]), ("b", [2]), ("c", [11])], (1, 2, 3), [0, 1, 2]),
        ([("a", [8]), ("b", [2]), ("c", [11])], (0, 1, 2), [1]),
    )
    for work, (first, middle, last), samples in steps:
        segments = [LoraSegment(first, middle, every), LoraSegment(middle, last, some)]
        lora = None if form is None else LoraBatch(segments, form)
        batch = replace(arena.batch(work, lora), sample_rows=torch.tensor(samples, dtype=torch.int64))
        found.append(decoder.forward(batch, kv))
    return [*found, kv.contiguous()]


@pytest.mark.slow
@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_layers_in_one_call_have_the_bits_of_single_kernels(
    variant: str, instruction_set: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, variant)
    library = load_library(instruction_set)
    cases = [(None, False), (KernelForm.UNPADDED, False), (KernelForm.PADDED, False), (FORM, True)]
    if read_model_config(tmp_path).norms != LLAMA_NORMS:
        cases.pop()  # norms of adapters run kernel by kernel
    for form, has_extras in cases:
        counting = Counting(instruction_set, library)
        at_once = forward_steps(tmp_path, counting, dtype, form, has_extras=has_extras)
        one_by_one = forward_steps(tmp_path, OneByOne(instruction_set, library), dtype, form, has_extras=has_extras)
        assert counting.calls == 0
        for found, expected in zip(at_once, one_by_one, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert all(found.isfinite().all() for found in at_once[:-1])


@pytest.mark.skipif(not supported_instruction_sets(), reason="no native library")
def test_steps_with_work_between_kernels_run_kernel_by_kernel(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    instruction_set = supported_instruction_sets()[0]
    kernels = Counting(instruction_set, load_library(instruction_set))
    forward_steps(tmp_path, kernels, torch.float32, KernelForm.EINSUM)
    assert kernels.calls == 5 * read_model_config(tmp_path).layers
