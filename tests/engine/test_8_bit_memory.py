"""Adapters and KV in 8 bits on a real model: near the answers in 16 bits, and the same under every mechanism."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet.adapters.numbers import to_codes
from lorikeet.adapters.store import reference
from lorikeet.config import ConfigError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvicted
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.model import adapter_elements
from lorikeet.engine.build import build_replica
from lorikeet.models.config import read_model_config
from tests.support.driver import AMPLE, SCARCE, Models, answer, make_models, random_tokens, tight_settings

pytestmark = pytest.mark.slow

Answers = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def answers(models: Models, tokens: int, **engine: object) -> tuple[Answers, EngineSizes]:
    """Return the tokens and logprobs by adapter and prompt, asked twice; and the sizes of the engine."""
    found, sizes, _ = answers_and_evictions(models, tokens, **engine)
    return found, sizes


def answers_and_evictions(models: Models, tokens: int, **engine: object) -> tuple[Answers, EngineSizes, int]:
    """Return the same, and how often an adapter was evicted."""
    replica = build_replica(tight_settings(models.folder, **engine))
    refs = {"base": None, **models.adapters}
    found: Answers = {}
    evictions = 0
    try:
        for turn in range(2):  # the second one finds KV of the first
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1)
            asked = [
                Request(RequestId(f"{name} {prompt} {turn}"), random_tokens(9 + 13 * prompt, prompt), sampling, 0, ref)
                for name, ref in refs.items()
                for prompt in range(3)
            ]
            for step in answer(replica.engine, asked):
                evictions += sum(isinstance(event, AdapterEvicted) for event in step.adapter_events)
                for output in step.tokens:
                    known = found.setdefault(output.request_id, [])
                    known += [(token.token_id, token.logprob or 0.0) for token in output.tokens]
        return found, replica.sizes, evictions
    finally:
        replica.engine.close()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_quantized_adapters_answer_as_their_dequantized_weights(models: Models, tmp_path: Path, kernels: str) -> None:
    geometry = read_model_config(models.folder).geometry(4)
    numbers = {name: _of_codes(ref, tmp_path / name, geometry) for name, ref in models.adapters.items()}
    same = {"preset": "lorikeet:plain", "memory_bytes": AMPLE, "kernels": kernels}
    plain, before = answers(Models(models.folder, numbers), 8, **same)
    coded, after = answers(models, 8, **same, lora_dtype="int8")
    for name, tokens in plain.items():
        assert [token for token, _ in coded[name]] == [token for token, _ in tokens]
        assert [logprob for _, logprob in coded[name]] == pytest.approx([logprob for _, logprob in tokens], abs=1e-3)
    ranks = models.adapters["wide"].ranks
    before_bytes, after_bytes = (adapter_elements(ranks, sizes.local_geometry) * 4 for sizes in (before, after))
    assert after_bytes / before_bytes < 0.3  # beside fp32


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_kv_changes_log_probabilities_by_little(models: Models, kernels: str) -> None:
    same = {"preset": "lorikeet:plain", "memory_bytes": AMPLE, "kernels": kernels}
    plain, before = answers(models, 1, **same)
    coded, after = answers(models, 1, **same, kv_cache_dtype="int8")
    off = [abs(coded[name][0][1] - tokens[0][1]) for name, tokens in plain.items()]
    assert 0 < sum(off) / len(off) < 0.05, f"log probabilities are off by {off}"
    assert after.block_bytes / before.block_bytes < 0.35  # beside fp32, and heads of few elements
    assert after.total_blocks > 2.8 * before.total_blocks


def test_answers_in_8_bits_are_the_same_when_memory_is_scarce(models: Models) -> None:
    form = {"lora_dtype": "int8", "kv_cache_dtype": "int8"}
    ample, _ = answers(models, 12, preset="lorikeet:plain", memory_bytes=AMPLE, **form)
    scarce, _, evictions = answers_and_evictions(
        models,
        12,
        preset="lorikeet:plain,cold_start=assist",
        memory_bytes=SCARCE // 3,
        host_memory_bytes=300_000,
        link_bytes_per_s=2e6,
        **form,
    )
    assert evictions, "memory is scarce"
    assert {name: [token for token, _ in each] for name, each in scarce.items()} == {
        name: [token for token, _ in each] for name, each in ample.items()
    }


def test_an_unknown_form_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'fp8'; choose one of: auto, int8"):
        build_replica(tight_settings(models.folder, kv_cache_dtype="fp8"))


def _of_codes(ref: AdapterRef, folder: Path, geometry: ModelGeometry) -> AdapterRef:
    """Write an adapter whose A and B are the numbers that the codes of another mean."""
    shutil.copytree(ref.folder, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        codes, scales = to_codes(tensor.T if "lora_B" in name else tensor)
        numbers = codes * scales[:, None]
        tensors[name] = np.ascontiguousarray(numbers.T if "lora_B" in name else numbers)
    save_file(tensors, folder / "adapter_model.safetensors")
    return reference(ref.name, folder, geometry)
