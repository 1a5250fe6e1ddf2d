"""aLoRA: an adapter that acts from its invocation on, and the KV before it, which is the base model's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lorikeet.adapters.checkpoint import DescribeOptions
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.reader import describe
from lorikeet.adapters.store import reference
from lorikeet.adapters.task import AdapterTask
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.models.config import read_model_config
from tests.support.live import VOCAB, greedy, live_settings, make_model, prompt, run

INVOCATION = [7, 11]
BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_alora(folder: Path, model: Path, seed: int, **more: Any) -> AdapterRef:
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "up_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, alora_invocation_tokens=INVOCATION, **more)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    peft.save_pretrained(folder)
    return reference(folder.name, folder, read_model_config(model).geometry(4))


def invoked(name: str, tokens: list[int], max_tokens: int, adapter: AdapterRef) -> Request:
    """The request as the server makes it."""
    start = AdapterTask(invocation_token_ids=tuple(INVOCATION)).start(tokens)
    found = greedy(name, tokens, max_tokens, None if start is None else adapter)
    return msgspec.structs.replace(found, adapter_start=start or 0)


def by_peft(model: Path, adapter: AdapterRef, tokens: list[int], count: int) -> list[int]:
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter.folder).eval()
    with torch.inference_mode():
        # No token ends it, as with the request.
        inputs = torch.tensor([tokens])
        found = peft.generate(input_ids=inputs, max_new_tokens=count, do_sample=False, eos_token_id=VOCAB)
    return found[0, len(tokens) :].tolist()


def computed(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """Run requests, and return their tokens and how many tokens were computed for them."""
    before = engine.stats().computed_tokens
    return run(engine, requests), engine.stats().computed_tokens - before


def test_the_description_of_an_alora_has_its_invocation(model: Path, tmp_path: Path) -> None:
    adapter = make_alora(tmp_path / "one", model, seed=1)
    found = describe(Path(adapter.folder), DescribeOptions(read_chat=True)).chat.task
    assert found.invocation_token_ids == tuple(INVOCATION)
    for tokens, start in (
        ([1, 2, 7, 11, 3], 2),
        ([7, 11, 3, 7, 11, 7], 3),
        ([7, 11], 0),
        ([7, 1, 11], None),
        ([11], None),
        ([], None),
    ):
        assert found.start(tokens) == start
    config = json.loads((Path(adapter.folder) / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == INVOCATION


@pytest.mark.slow
def test_tokens_equal_peft_for_every_adapter_start_and_in_batches(model: Path, tmp_path: Path) -> None:
    one, two = (make_alora(tmp_path / str(seed), model, seed) for seed in (1, 2))
    prompts = {
        f"{before}-{after}": [*prompt(before, before), *INVOCATION, *prompt(after, after + 50)]
        for before, after in ((0, 3), (1, 0), (4, 1), (21, 9), (30, 0))
    }
    prompts["twice"] = [*prompt(9, 1), *INVOCATION, *prompt(6, 2), *INVOCATION, *prompt(2, 3)]
    prompts["never"] = prompt(17, 8)
    requests = [
        invoked(f"{name}-{which}", tokens, 6, adapter)
        for name, tokens in prompts.items()
        for which, adapter in enumerate((one, two))
    ]
    plain = [greedy(f"base-{name}", tokens, 6) for name, tokens in prompts.items()]
    engine = build_replica(live_settings(model, max_num_batched_tokens=24)).engine  # prompts come in chunks
    try:
        for turn in range(2):  # the second one finds KV
            found = run(engine, renamed([*requests, *plain], turn))
            for request, tokens in zip(requests, found[: len(requests)], strict=True):
                adapter = two if request.request_id.endswith("1") else one
                assert tokens == by_peft(model, adapter, request.prompt_token_ids, 6), request.request_id
            engine._memory.check_integrity()
        assert found[len(requests) - 1] == found[-1]  # without an invocation it is the base
    finally:
        engine.close()


def test_alora_with_weights_before_its_invocation_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="alora_invocation_tokens"):
        make_alora(tmp_path / "one", model, seed=1, modules_to_save=["norm"])


def renamed(requests: list[Request], turn: int) -> list[Request]:
    return [msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}@{turn}")) for each in requests]


@pytest.mark.slow
def test_a_second_turn_under_another_adapter_prefills_from_the_invocation_on(model: Path, tmp_path: Path) -> None:
    one, two = (make_alora(tmp_path / str(seed), model, seed) for seed in (1, 2))
    document = prompt(200, 4)
    engine = build_replica(live_settings(model)).engine
    try:
        _, tokens = computed(engine, [greedy("base", [*document, 5], 1)])
        assert tokens == 201
        for name, adapter in (("one", one), ("two", two)):
            _, tokens = computed(engine, [invoked(name, [*document, *INVOCATION, 9], 1, adapter)])
            assert tokens == 3  # the document, 50 blocks, is the base's
        # A second turn with the first adapter finds what it has computed itself.
        longer = [*document, *INVOCATION, 9, *prompt(20, 6)]
        computed(engine, [invoked("one-longer", longer, 1, one)])
        _, tokens = computed(engine, [invoked("one-again", [*longer, 3], 1, one)])
        assert tokens <= BLOCK
        _, tokens = computed(engine, [invoked("two-longer", longer, 1, two)])
        assert tokens == len(longer) - 200
        # And the base what the adapters computed before their invocation.
        other = prompt(100, 5)
        computed(engine, [invoked("one-other", [*other, *INVOCATION], 1, one)])
        _, tokens = computed(engine, [greedy("base-other", [*other, 5], 1)])
        assert tokens == 1
        engine._memory.check_integrity()
    finally:
        engine.close()


@pytest.mark.slow
def test_dropping_an_adapter_frees_its_kv_and_keeps_the_base_kv(model: Path, tmp_path: Path) -> None:
    one = make_alora(tmp_path / "one", model, seed=1)
    document, after = prompt(40, 4), prompt(20, 6)
    engine = build_replica(live_settings(model)).engine
    try:
        computed(engine, [invoked("one", [*document, *INVOCATION, *after], 1, one)])
        before = engine.stats().cached_blocks
        engine.drop_adapter(one.digest)
        engine.step()
        assert before - engine.stats().cached_blocks >= 5  # of 22 tokens behind the document, and the weights
        engine._memory.check_integrity()
        _, tokens = computed(engine, [greedy("base", [*document, 5], 1)])
        assert tokens == 1
        _, tokens = computed(engine, [invoked("again", [*document, *INVOCATION, *after], 1, one)])
        assert tokens == 22
        engine._memory.check_integrity()
    finally:
        engine.close()
