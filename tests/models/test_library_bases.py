"""Any decoder of transformers, with an adapter on all its linear layers, answers like transformers with PEFT.

Through the whole engine: prompts in chunks, prefixes from the cache, decode steps beside each other, preemption. A few
architectures run by default, and all that the library lists with ``--all``.
"""

import gc
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.store import reference
from lorikeet.memory.packing import pack
from lorikeet.models.architectures import ARCHITECTURES
from lorikeet.models.transformers_attention import UnsupportedAttention
from tests.models.library_bases import NotTried, decoders, make_base, model_class, random_ids, row
from tests.models.library_runs import MAX_MODEL_LEN, check, geometry_of, make_peft_adapter, request, run, settings_of
from tests.support import sampling

SAMPLE = (
    *("gemma3_text", "gpt2", "gpt_oss", "granite", "phi3", "qwen3_moe"),
    *("granitemoehybrid", "deepseek_v32", "doge", "minimax_m3_vl_text", "openai-gpt"),
    *("prophetnet", "roberta", "stablelm"),
)
"""Windows and norms; Conv1D and learned positions; sinks and experts; multipliers; fused layers; experts.

States beside keys and values.

By transformers' own attention: chosen tokens; linear layers of cached values; chosen blocks; no cache; the whole
model; positions that the model counts; attention that cannot be replaced.
"""
PAGE = Path(__file__).parents[2] / "docs/models.md"

KINDS = sorted(decoders()) if sampling.runs_all else sorted(SAMPLE)
OWN_SAMPLE = ("gemma2", "gemma3", "glm4", "granitemoehybrid", "olmo3", "phi3", "qwen3_5_text")
"""Soft caps and norms around; a vision model; neighbours rotated; a state space; norms after; fused layers; a gated
delta rule."""
OWN_KINDS = sorted(
    kind for kind in (decoders() if sampling.runs_all else OWN_SAMPLE) if model_class(kind).__name__ in ARCHITECTURES
)
OWN_SETTINGS: dict[str, dict[str, Any]] = {"granitemoehybrid": {"num_local_experts": 0}}
"""Keys of configs without which the own decoder refuses a base."""

IN_FP64 = {"gemma4_unified_text"}
"""Bases that are compared with what transformers computes in fp64: in fp32 its own rounding is up to 8e-5."""


def serve_as_peft(folder: Path, kind: str, model_impl: str = "transformers", **options: Any) -> float:
    """Serve a tiny base and an adapter; return the largest difference of a log probability from PEFT's.

    Raises:
        UnsupportedAttention: the base is refused.
    """
    base = make_base(folder / "base", kind, **(OWN_SETTINGS.get(kind, {}) if model_impl == "lorikeet" else {}))
    peft = make_peft_adapter(base, folder / "adapter", **options)
    long = random_ids(37, 1)
    geometry = geometry_of(folder / "base", model_impl)
    ref = reference("adapter", folder / "adapter", geometry)
    first = [
        request("scored", long, ref, 4, prompt_logprobs=0),
        request("base", long, None, 4),
        request("short", [7], ref, 4),
        request("adapted", long, ref, 4),
    ]
    again = [request("again", [*long, 9, 9, 9], ref, 6), request("base again", [*long[:30], 5], None, 6)]
    elements = geometry.block_elements(4)
    states = 8 * geometry.state_blocks(4)  # of a sequence, and of some snapshots
    min_blocks = MAX_MODEL_LEN // 4 + states + pack(geometry.full_ranks(8), geometry, elements).blocks
    spare_blocks = min_blocks - pack(ref.ranks, geometry, elements).blocks
    sequences = spare_blocks // 13 + 8  # of 50 tokens each
    crowd = [request(f"r{i}", random_ids(20, i), ref if i % 2 else None, 30) for i in range(sequences)]
    memory_bytes = min_blocks * geometry.block_bytes(4)
    settings = settings_of(folder / "base", model_impl, memory_bytes=memory_bytes, max_num_seqs=sequences)
    outcome = run(settings, [first, again, crowd])
    assert sorted(outcome.prompts["scored"]) == list(range(1, len(long)))
    assert outcome.cached_tokens >= 28, "no prefix came from the cache"
    assert outcome.preemptions, "nothing was preempted"
    if kind in IN_FP64:
        peft = peft.double()
    return check(outcome, [*first, *again, *crowd], base, peft)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_with_an_adapter_on_all_linear_layers_equal_peft(kind: str, tmp_path: Path) -> None:
    reason = ""
    try:
        assert serve_as_peft(tmp_path, kind) < 1e-4
    except (NotTried, UnsupportedAttention) as error:
        reason = str(error)
    finally:
        gc.collect()
    lines = PAGE.read_text().splitlines()
    assert any(line.startswith(row(kind, reason)) for line in lines), "run docs/make_models.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_KINDS)
def test_the_own_decoder_equals_peft_too(kind: str, tmp_path: Path) -> None:
    assert serve_as_peft(tmp_path, kind, "lorikeet") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "saved"),
    [(["q_proj", "in_proj_z", "up_proj"], ["conv1d", "norm"]), (["q_proj", "down_proj"], ["linear_attn"])],
    ids=["convolution-and-norm", "whole-layer"],
)
def test_weights_of_a_delta_rule_that_an_adapter_saves_equal_peft(
    tmp_path: Path, targets: list[str], saved: list[str]
) -> None:
    options = {"target_modules": targets, "modules_to_save": saved}
    assert serve_as_peft(tmp_path, "qwen3_5_text", "lorikeet", **options) < 1e-4
