"""With ``deterministic`` an answer has the same bits whatever else the engine does."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.reader import describe
from lorikeet.adapters.store import reference
from lorikeet.config import ConfigError, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import PromptToken, Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica, deterministic
from lorikeet.engine.loop import Engine
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.native import supported_instruction_sets
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.models.checkpoints import make_checkpoint
from tests.support.fakes import write_dora
from tests.support.live import prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not supported_instruction_sets(), reason="no native library on this machine"),
]

BASES = (
    ("llama", "auto"),
    ("mistral-window", "int8"),
    pytest.param(("qwen3", "auto"), marks=pytest.mark.long),
    pytest.param(("qwen3-5", "int8"), marks=pytest.mark.long),
    pytest.param(("gemma2", "int8"), marks=pytest.mark.long),
)
"""Bases, and how KV and adapters are kept."""
DTYPES = ("float32", "bfloat16")
RANKS = (1, 4, 13)
SCARCE, AMPLE = 260_000, 4_000_000
"""Bytes: some that make sequences preempt each other, and plenty."""
ALONE: dict[str, Any] = {
    "preset": "lorikeet:plain-no-reuse",
    "max_num_batched_tokens": 512,
    "draft_tokens": 0,
    "num_scheduler_steps": 1,
    "threads": 1,
}
ENGINES: tuple[dict[str, Any], ...] = (
    {"preset": "auto", "max_num_batched_tokens": 16, "threads": 2, "memory_bytes": SCARCE},
    {"preset": "elora", "max_num_batched_tokens": 5, "draft_tokens": 0, "host_memory_bytes": 600_000},
    {"preset": "lorikeet:plain-padded", "max_num_batched_tokens": 64, "max_num_seqs": 4, "memory_bytes": SCARCE},
)
"""An engine that computes one request at a time, and others that do all that may change a batch."""


@dataclass(frozen=True)
class Asked:
    """A request, named by its number in the test."""

    adapter: int
    prefix: int
    own: int
    max_tokens: int
    wish: int

    def request(self, name: str, models: "Models") -> Request:
        """Return it under a name."""
        token_ids = prompt(self.prefix, seed=1) + prompt(self.own, seed=self.own)
        sampling = SamplingParams(max_tokens=self.max_tokens, **WISHES[self.wish])
        adapter = models.adapters[self.adapter]
        return Request(RequestId(name), token_ids, sampling, 0.0, adapter)


WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 7, "logprobs": 0},
    {"temperature": 0.8, "seed": 2**63 + 5, "top_p": 0.9, "top_k": 20, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 1.3, "seed": 1, "min_p": 0.05, "logprobs": 1, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0, "presence_penalty": 0.5},
)


class Answered(NamedTuple):
    """Everything that an answer has."""

    tokens: list[Token]
    prompt: dict[int, PromptToken]


class Models:
    """A checkpoint with adapters, engines over it, and the answers that it gave alone."""

    def __init__(self, folder: Path, variant: str, kv: str = "auto", b_std: float = 0.4) -> None:
        self.folder = folder / "base"
        make_checkpoint(self.folder, variant)
        geometry = read_model_config(self.folder).geometry(4)
        self.adapters: list[AdapterRef | None] = [None]
        for rank in RANKS:
            path = write_random_adapter(folder / f"rank-{rank}", geometry, rank, seed=rank, b_std=b_std)
            self.adapters.append(reference(path.name, path, geometry))
        self._kv = kv
        self._alone: dict[tuple[str, Asked], Answered] = {}
        self._engines: dict[tuple[str, int], Engine] = {}
        self._names = itertools.count()

    def name(self) -> str:
        """Return a name that no other request has; one with the same name would find the KV of a scored prompt."""
        return f"{next(self._names)}"

    def build(self, dtype: str, *, is_deterministic: bool = True, **engine: Any) -> Engine:
        """Return a new engine."""
        small = {
            "block_size": 4,
            "memory_bytes": AMPLE,
            "host_memory_bytes": 0,
            "kv_cache_dtype": self._kv,
            "lora_dtype": self._kv,
        }
        given = EngineSettings(**{**small, "deterministic": is_deterministic, **engine})
        return build_replica(Settings(ModelSettings(str(self.folder), dtype=dtype), given)).engine

    def engine(self, dtype: str, number: int) -> Engine:
        """Return one of ``ENGINES``, with the KV of earlier requests; -1 for ``ALONE``, which keeps none."""
        if (dtype, number) not in self._engines:
            self._engines[dtype, number] = self.build(dtype, **(ALONE if number < 0 else ENGINES[number]))
        return self._engines[dtype, number]

    def alone(self, dtype: str, asked: Asked) -> Answered:
        """Return what an engine with nothing else to do answers, in one chunk, without drafts."""
        if (dtype, asked) not in self._alone:
            name = self.name()
            self._alone[dtype, asked] = run(self.engine(dtype, -1), [asked.request(name, self)])[name]
        return self._alone[dtype, asked]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def run(engine: Engine, requests: list[Request], turns: int | None = None) -> dict[str, Answered]:
    """Run requests to their ends, or for some turns; return what they have then."""
    for each in requests:
        engine.submit(each)
    found = {each.request_id: Answered([], {}) for each in requests}
    turn = 0
    while engine.has_requests and (turns is None or turn < turns):
        turn += 1
        outputs = engine.step()
        for output in outputs.tokens:
            found[output.request_id].tokens.extend(output.tokens)
        for scored in outputs.prompt_logprobs:
            for at, token in enumerate(scored.tokens):
                known = found[scored.request_id].prompt.setdefault(scored.position + at, token)
                assert known == token, "a prompt that is computed again has the same bits"
        if not engine.is_busy:
            engine.wait_for_transfer(1.0)
    return dict(found)


@pytest.fixture(scope="module", params=BASES, ids="-".join)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp(request.param[0]), *request.param)
    yield made
    made.close()


asked = st.builds(
    Asked,
    adapter=st.integers(0, len(RANKS)),
    prefix=st.sampled_from([0, 9, 40]),
    own=st.integers(1, 30),
    max_tokens=st.sampled_from([1, 8, 20]),
    wish=st.integers(0, len(WISHES) - 1),
)


@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.lists(asked, min_size=1, max_size=6),
    number=st.integers(0, len(ENGINES) - 1),
    other=st.integers(0, len(ENGINES) - 1),
    killed=st.one_of(st.none(), st.integers(1, 30)),
)
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # engines keep KV, so a smaller case may not show what a large one did
    suppress_health_check=list(HealthCheck),
)
def test_answers_have_the_same_bits_in_any_batch_chunk_and_engine(
    models: Models, dtype: str, batch: list[Asked], number: int, other: int, killed: int | None
) -> None:
    """Requests meet the KV of earlier ones and preempt each other; after some turns others may go on with them."""
    engine = models.engine(dtype, number)
    requests = [one.request(models.name(), models) for one in batch]
    found = run(engine, requests, killed)
    if engine.has_requests:
        for each in requests:
            engine.abort(each.request_id)
        run(engine, [])
        rest = [resumed(each, found[each.request_id]) for each in requests if is_unfinished(each, found)]
        for name, more in run(models.engine(dtype, other), rest).items():
            found[name].tokens.extend(more.tokens)
            assert all(found[name].prompt.setdefault(at, one) == one for at, one in more.prompt.items())
    for request, one in zip(requests, batch, strict=True):
        assert found[request.request_id] == models.alone(dtype, one), request


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_engine_goes_on_with_the_same_bits(models: Models, dtype: str) -> None:
    """An engine ends in the middle of its answers."""
    batch = [Asked(at % 4, 40, at + 3, 20, at % len(WISHES)) for at in range(5)]
    requests = [one.request(models.name(), models) for one in batch]
    for turns in (2, 7):
        ended = models.build(dtype, **{**ENGINES[0], "num_scheduler_steps": 1})
        try:
            found = run(ended, requests, turns)
            assert ended.has_requests
        finally:
            ended.close()
        following = models.build(dtype, **ENGINES[1])
        try:
            rest = [resumed(each, found[each.request_id]) for each in requests if is_unfinished(each, found)]
            for name, more in run(following, rest).items():
                found[name].tokens.extend(more.tokens)
                found[name].prompt.update(more.prompt)
        finally:
            following.close()
        for request, one in zip(requests, batch, strict=True):
            assert found[request.request_id] == models.alone(dtype, one)


def is_unfinished(request: Request, found: dict[str, Answered]) -> bool:
    return len(found[request.request_id].tokens) < request.sampling.max_tokens


def resumed(request: Request, so_far: Answered) -> Request:
    """Return a request as another engine gets it."""
    token_ids = [token.token_id for token in so_far.tokens]
    return msgspec.structs.replace(request, output_token_ids=token_ids, attempt=1)


def test_without_it_the_same_test_would_fail(tmp_path: Path) -> None:
    """A decode after a prefix hit differs from one after a prefill, in bf16."""
    models = Models(tmp_path, "llama")
    one = Asked(adapter=2, prefix=40, own=11, max_tokens=20, wish=0)
    answers = []
    for chunk in (5, 512):
        engine = models.build("bfloat16", is_deterministic=False, max_num_batched_tokens=chunk)
        try:
            answers.append(run(engine, [one.request("one", models)])["one"])
        finally:
            engine.close()
    assert answers[0] != answers[1]


@pytest.fixture(scope="module")
def default_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("peft"), "llama", b_std=0.05)  # as trained adapters, whose deltas are small
    yield made
    made.close()


@pytest.mark.parametrize("adapter", range(len(RANKS) + 1))
def test_log_probabilities_are_those_of_transformers_and_peft(default_models: Models, adapter: int) -> None:
    """In fp32 within 1e-5, of prompt and answer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    models = default_models
    one = Asked(adapter=adapter, prefix=40, own=11, max_tokens=20, wish=4)
    found = models.alone("float32", one)
    asked_for = one.request("one", models)
    peer = AutoModelForCausalLM.from_pretrained(models.folder, dtype=torch.float32)
    if asked_for.adapter is not None:
        peer = PeftModel.from_pretrained(peer, asked_for.adapter.folder)
    ids = asked_for.prompt_token_ids + [token.token_id for token in found.tokens]
    with torch.inference_mode():
        expected = peer.eval()(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    own = [found.prompt[at].logprob for at in range(1, len(asked_for.prompt_token_ids))]
    own += [token.logprob or math.nan for token in found.tokens]
    theirs = expected[range(len(ids) - 1), ids[1:]].tolist()
    assert max(abs(a - b) for a, b in zip(own, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"preset": "lorikeet:merge-paid"}, "merges adapters"),
        ({"preset": "lorikeet:plain-einsum"}, "einsum"),
        ({"tensor_parallel": 2}, "several ranks"),
        ({"pipeline_parallel": 2}, "several ranks"),
    ],
)
def test_settings_that_make_answers_depend_on_others_are_refused(engine: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        deterministic(Settings(engine=EngineSettings(deterministic=True, **engine)))
    assert deterministic(Settings(engine=EngineSettings(deterministic=True))).engine.host_lora_workers == 0


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [("reference", torch.float32, "cpu"), ("auto", torch.float16, "cpu"), ("auto", torch.bfloat16, "cuda")],
)
def test_only_the_native_kernels_have_one_order(name: str, dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ValueError, match="deterministic needs the native kernels"):
        choose_kernels(name, dtype, torch.device(device), one_order=True)


def test_bases_of_transformers_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "llama")
    model = ModelSettings(str(tmp_path / "base"), dtype="float32", model_impl="transformers")
    with pytest.raises(ConfigError, match="needs Lorikeet's own decoder"):
        build_replica(Settings(model, EngineSettings(deterministic=True, memory_bytes=AMPLE)))


def test_adapters_that_torch_multiplies_are_refused_and_dora_is_not(default_models: Models, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = DescribeOptions(checks=AdapterChecks(only_own_products="not with --deterministic"))
    describe(write_dora(tmp_path / "dora"), options)
    base = AutoModelForCausalLM.from_pretrained(default_models.folder)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(base, config).save_pretrained(tmp_path / "head")
    with pytest.raises(AdapterError, match="not with --deterministic"):
        describe(tmp_path / "head", options)
