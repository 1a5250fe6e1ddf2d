"""Recurrences of transformers' modules by our kernels give the results of the modules, for all sequences at once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from lorikeet.kernels.native import supported_instruction_sets
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.transformers_decoder import TransformersDecoder, _check_batch, load_model
from lorikeet.models.transformers_gathered import Way
from lorikeet.models.transformers_recurrences import replace_gated_norm
from tests.kernels.linear_cases import kernels as native
from tests.models.library_bases import make_base, random_ids

KINDS = ("qwen3_5_text", "granitemoehybrid", "lfm2")
"""A gated delta rule, Mamba-2, and short convolutions alone."""
BLOCK_TOKENS = 4
STEPS = (
    [(0, 9, [0, 1, 2, 3, 4, 5]), (0, 1, [6, 7])],
    [(9, 10, [0, 1, 2, 3, 4, 5]), (1, 6, [6, 7]), (0, 24, [8, 9, 10, 11, 12, 13])],
    [(10, 24, [0, 1, 2, 3, 4, 5]), (6, 7, [6, 7])],
)
"""Rows and KV blocks of sequences: prompts in chunks, decodes, and new sequences beside them."""
KV_BLOCKS = 14


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instruction_set", ["", *supported_instruction_sets()[:1]])
def test_steps_by_kernels_equal_steps_by_modules(kind: str, instruction_set: str, tmp_path: Path) -> None:
    backend = native(instruction_set) if instruction_set else ReferenceKernels()
    make_base(tmp_path, kind)
    decoder = TransformersDecoder(load_model(tmp_path, torch.float32, torch.device("cpu")), backend, 128)
    states = decoder._states
    assert states.by_kernels
    ids = torch.tensor(random_ids(24, 3))
    count = decoder.geometry.state_blocks(BLOCK_TOKENS)
    tables = [list(range(KV_BLOCKS + i * count, KV_BLOCKS + (i + 1) * count)) for i in range(3)]
    found = []
    for by_kernels in (True, False):
        states.by_kernels = by_kernels
        arena = torch.zeros(KV_BLOCKS + 3 * count, decoder.geometry.block_elements(BLOCK_TOKENS))
        decoder.view_kv(arena, BLOCK_TOKENS)
        batches = [_check_batch(ids, rows, BLOCK_TOKENS, tables[: len(rows)]) for rows in STEPS]
        found.append(torch.cat([decoder.forward(batch, arena) for batch in batches]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_rows_that_a_module_transposes_are_multiplied(tmp_path: Path) -> None:
    """Mamba passes a transposed view to a linear layer; a wrong product would fail the check at the start."""
    make_base(tmp_path, "mamba")
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert TransformersDecoder(model, native(supported_instruction_sets()[0]), 128).way is Way.KERNELS


def test_a_state_that_the_kernels_cannot_keep_is_left_to_the_module(tmp_path: Path) -> None:
    """Jamba's state space is Mamba's first: its file has no function that the kernels compute."""
    make_base(tmp_path, "jamba")
    decoder = TransformersDecoder(load_model(tmp_path, torch.float32, torch.device("cpu")), ReferenceKernels(), 128)
    assert decoder.geometry.states
    assert not decoder._states.by_kernels


def test_gated_norms_are_replaced_by_the_kernel() -> None:
    seen: list[tuple[int, bool]] = []

    class Recording(ReferenceKernels):
        def gated_norm(
            self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
        ) -> Tensor:
            seen.append((group, is_norm_first))
            return super().gated_norm(x, gate, weight, eps, group, is_norm_first=is_norm_first)

    for module, kind in ((Qwen3_5RMSNormGated(12), (12, True)), (GraniteMoeHybridRMSNormGated(12, 4), (4, False))):
        nn.init.normal_(module.weight)
        x, gate = torch.randn(2, 2, 5, 12)
        with torch.inference_mode():
            expected = module(x, gate)
            replace_gated_norm(module, Recording())
            seen.clear()
            torch.testing.assert_close(module(x, gate), expected, atol=1e-5, rtol=1e-5)
        assert seen == [kind]


def test_other_norms_are_left_as_they_are() -> None:
    module = Qwen3_5RMSNorm(12)
    forward = module.forward
    replace_gated_norm(module, ReferenceKernels())
    assert module.forward == forward
