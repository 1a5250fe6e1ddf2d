"""Adapters and KV in 8 bits on a real model: near the answers in 16 bits, and the same under every mechanism."""

import pytest

from lorikeet.config import ConfigError
from lorikeet.core.executor import EngineSizes
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.model import adapter_elements
from lorikeet.engine.build import build_replica
from tests.support.driver import AMPLE, SCARCE, Models, answer, make_models, random_tokens, tight_settings

pytestmark = pytest.mark.slow

Answers = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def answers(models: Models, tokens: int, **engine: object) -> tuple[Answers, EngineSizes]:
    """Return the tokens and logprobs by adapter and prompt, asked twice; and the sizes of the engine."""
    replica = build_replica(tight_settings(models.folder, **engine))
    refs = {"base": None, **models.adapters}
    found: Answers = {}
    try:
        for turn in range(2):  # the second one finds KV of the first
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1)
            asked = [
                Request(RequestId(f"{name} {prompt} {turn}"), random_tokens(9 + 13 * prompt, prompt), sampling, 0, ref)
                for name, ref in refs.items()
                for prompt in range(3)
            ]
            for output in (each for step in answer(replica.engine, asked) for each in step.tokens):
                known = found.setdefault(output.request_id, [])
                known += [(token.token_id, token.logprob or 0.0) for token in output.tokens]
        return found, replica.sizes
    finally:
        replica.engine.close()


@pytest.mark.parametrize("form", [{"lora_dtype": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_answers_are_near_those_in_16_bits(models: Models, form: dict[str, str], kernels: str) -> None:
    plain, before = answers(models, 1, preset="lorikeet:plain", memory_bytes=AMPLE, kernels=kernels)
    coded, after = answers(models, 1, preset="lorikeet:plain", memory_bytes=AMPLE, kernels=kernels, **form)
    off = [abs(coded[name][0][1] - plain[name][0][1]) for name in plain]
    assert 0 < max(off) < 0.05, f"log probabilities are off by up to {max(off)}"
    assert all(first == again for name, first in coded.items() if (again := coded[f"{name[:-1]}1"]))
    ref = models.adapters["wide"]
    adapter = [adapter_elements(ref.ranks, sizes.local_geometry) for sizes in (before, after)]
    token = [sizes.local_geometry.kv_elements_per_token() for sizes in (before, after)]
    shares = adapter[1] / adapter[0], token[1] / token[0]
    assert [share < 0.35 for share in shares] == ["lora_dtype" in form, "kv_cache_dtype" in form]  # beside fp32


def test_they_are_the_same_when_memory_is_scarce(models: Models) -> None:
    form = {"lora_dtype": "int8", "kv_cache_dtype": "int8"}
    ample, _ = answers(models, 12, preset="lorikeet:plain", memory_bytes=AMPLE, **form)
    scarce, _ = answers(
        models,
        12,
        preset="lorikeet:plain,cold_start=assist",
        memory_bytes=SCARCE // 3,
        host_memory_bytes=300_000,
        link_bytes_per_s=2e6,
        **form,
    )
    assert {name: [token for token, _ in each] for name, each in scarce.items()} == {
        name: [token for token, _ in each] for name, each in ample.items()
    }


def test_an_unknown_form_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'fp8'; choose one of: auto, int8"):
        build_replica(tight_settings(models.folder, kv_cache_dtype="fp8"))
