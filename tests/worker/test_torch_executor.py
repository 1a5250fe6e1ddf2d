"""The torch executor gives the tokens of transformers and PEFT, for plans divided in any way."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorikeet.config import ConfigError
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import SequenceStep, StepPlan
from lorikeet.worker.torch_executor import build_torch_executor
from tests.models.checkpoints import make_checkpoint
from tests.support.driver import (
    Driver,
    Latch,
    Models,
    driving,
    fp32_settings,
    make_models,
    peer_tokens,
    random_tokens,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def driver(models: Models) -> Iterator[Driver]:
    with driving(models.folder) as made:
        yield made


def test_greedy_tokens_match_transformers_and_peft_for_any_chunking(models: Models, driver: Driver) -> None:
    assert [done.error for done in driver.load(*models.adapters.values())] == [None] * 3
    lengths = {"base-a": 21, "narrow": 9, "attention": 17, "wide": 30, "base-b": 1}
    prompts = {name: random_tokens(length, seed=length) for name, length in lengths.items()}
    for name, prompt in prompts.items():
        driver.add(name, prompt, models.adapters.get(name))
    driver.step({"base-a": 10, "wide": 1})
    driver.step({"base-a": 11, "wide": 20, "narrow": 9})
    driver.step({"wide": 9, "base-a": 1, "narrow": 1, "base-b": 1, "attention": 16})
    driver.step({"base-a": 1, "attention": 1})
    driver.decode(list(prompts), 12)
    driver.decode(["narrow", "base-b"], 4)
    for name, prompt in prompts.items():
        found = driver.token_ids(name)
        assert found == peer_tokens(models.folder, models.adapters.get(name), prompt, len(found)), name


def test_each_adapter_changes_the_tokens(models: Models) -> None:
    prompt = random_tokens(9, seed=1)
    answers = [peer_tokens(models.folder, ref, prompt, 16) for ref in (None, *models.adapters.values())]
    assert len({tuple(answer) for answer in answers}) == 4


def test_a_repeat_gives_the_tokens_of_as_many_single_steps(models: Models, driver: Driver) -> None:
    driver.load(models.adapters["wide"])
    for name in ("single", "repeated"):
        driver.add(f"{name}-base", random_tokens(7, seed=1), temperature=1.0, seed=3)
        driver.add(f"{name}-wide", random_tokens(6, seed=2), models.adapters["wide"])
        driver.step({f"{name}-base": 7, f"{name}-wide": 6})
    driver.decode(["single-base", "single-wide"], 16)
    driver.decode(["repeated-base", "repeated-wide"], 16, repeat=8)
    assert driver.tokens["repeated-base"] == driver.tokens["single-base"]
    assert driver.tokens["repeated-wide"] == driver.tokens["single-wide"]
    assert len(driver.tokens["single-base"]) == 17


def test_a_repeat_ends_with_the_first_stop_token_of_any_sequence(driver: Driver) -> None:
    prompt = random_tokens(7, seed=1)
    driver.add("free", prompt)
    driver.step({"free": 7})
    driver.decode(["free"], 8)
    free = driver.token_ids("free")
    stop = free[4]
    steps_to_stop = free.index(stop, 1)
    driver.add("stopped", prompt, stop_token_ids=(stop,))
    driver.add("other", random_tokens(5, seed=2))
    driver.step({"stopped": 7, "other": 5})
    result = driver.step({"stopped": 1, "other": 1}, repeat=8)
    assert result.steps_run == steps_to_stop
    assert [len(tokens) for tokens in result.tokens] == [steps_to_stop] * 2
    assert driver.token_ids("stopped") == free[: steps_to_stop + 1]


def test_a_repeat_ends_when_its_time_is_over(driver: Driver) -> None:
    driver.add("a", random_tokens(7, seed=1))
    driver.step({"a": 7})
    result = driver.step({"a": 1}, repeat=8, max_duration_s=0.0)
    assert result.steps_run == 1
    assert len(driver.tokens["a"]) == 2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 11, "frequency_penalty": 0.5, "top_p": 0.9}])
def test_dropped_and_recomputed_sequence_continues_with_the_same_tokens(
    models: Models, driver: Driver, params: dict[str, Any]
) -> None:
    adapter = models.adapters["attention"]
    driver.load(adapter)
    prompt = random_tokens(10, seed=4)
    for name in ("undisturbed", "preempted"):
        driver.add(name, prompt, adapter, **params)
        driver.step({name: 10})
        driver.decode([name], 6)
    driver.drop("preempted")
    driver.add("bystander", prompt)
    driver.step({"bystander": 10})
    outputs = driver.token_ids("preempted")
    driver.add("preempted", prompt, adapter, outputs, **params)
    driver.step({"preempted": 12})
    driver.step({"preempted": 5})
    driver.decode(["preempted"], 9, repeat=3)
    driver.decode(["undisturbed"], 10)
    assert driver.tokens["preempted"] == driver.tokens["undisturbed"]


def test_logprobs_are_reported_with_the_tokens(driver: Driver) -> None:
    driver.add("a", random_tokens(7, seed=1), logprobs=2)
    ((token,),) = driver.step({"a": 7}).tokens
    assert token.top[0] == (token.token_id, token.logprob)
    assert len(token.top) == 2


def test_failed_load_is_reported_and_harms_no_other_request(models: Models, driver: Driver, tmp_path: Path) -> None:
    wide = models.adapters["wide"]
    shutil.copytree(wide.folder, tmp_path / "broken")
    weights = tmp_path / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    missing = msgspec.structs.replace(wide, folder=str(tmp_path / "none"), digest="missing")
    broken = msgspec.structs.replace(
        wide, folder=str(weights.parent), digest="broken", weight_bytes=weights.stat().st_size
    )
    driver.load(wide)
    prompt = random_tokens(6, seed=2)
    driver.add("wide", prompt, wide)
    driver.step({"wide": 6})
    errors = dict(zip(("missing", "broken"), [done.error or "" for done in driver.load(missing, broken)], strict=True))
    assert str(tmp_path / "none") in errors["missing"]
    assert weights.name in errors["broken"]
    driver.decode(["wide"], 8)
    assert driver.token_ids("wide") == peer_tokens(models.folder, wide, prompt, 9)
    driver.add("doomed", prompt, broken)
    with pytest.raises(ExecutorError, match="adapter broken is used, but is not loaded"):
        driver.step({"doomed": 6})


def test_an_evicted_adapter_cannot_be_used_until_it_is_loaded_again(models: Models, driver: Driver) -> None:
    adapter = models.adapters["narrow"]
    driver.load(adapter)
    driver.execute(StepPlan(1, evictions=(adapter.digest,)))
    prompt = random_tokens(6, seed=2)
    driver.add("early", prompt, adapter)
    with pytest.raises(ExecutorError, match="is not loaded"):
        driver.step({"early": 6})
    assert driver.load(adapter)[0].error is None
    driver.add("late", prompt, adapter)
    driver.step({"late": 6})
    assert driver.token_ids("late") == peer_tokens(models.folder, adapter, prompt, 1)


def test_load_ending_after_its_adapters_eviction_is_reported_but_not_used(models: Models, driver: Driver) -> None:
    adapter = models.adapters["wide"]
    driver.load(adapter, wait=False)
    driver.execute(StepPlan(1, evictions=(adapter.digest,)))
    (done,) = driver.wait_for_transfers(1)
    assert done.error is None
    driver.add("early", random_tokens(6, seed=2), adapter)
    with pytest.raises(ExecutorError, match="is not loaded"):
        driver.step({"early": 6})


def test_the_loop_is_woken_when_a_transfer_ends(models: Models) -> None:
    woken = Latch()
    with driving(models.folder, woken) as driver:
        driver.load(models.adapters["narrow"], wait=False)
        assert woken.wait()
        assert len(driver.executor.completed_transfers()) == 1
        assert driver.executor.completed_transfers() == []


def test_sequences_that_were_never_started_are_named(driver: Driver) -> None:
    step = SequenceStep(RequestId("ghost"), 0, 1, (), samples=True)
    with pytest.raises(ExecutorError, match="request ghost"):
        driver.execute(StepPlan(0, sequences=(step,)))
    with pytest.raises(ExecutorError, match="request ghost"):
        driver.execute(StepPlan(1, drops=(RequestId("ghost"),)))


def test_output_that_is_not_finite_fails_its_request_and_no_other(tmp_path: Path) -> None:
    model: Any = make_checkpoint(tmp_path, "llama")
    model.get_input_embeddings().weight.data[96] = float("nan")
    model.save_pretrained(tmp_path)
    with driving(tmp_path) as driver:
        driver.add("fine", [1, 2, 3])
        driver.add("sick", [1, 2, 96])
        result = driver.step({"fine": 3, "sick": 3})
        assert set(result.failed) == {"sick"}
        assert len(driver.tokens["fine"]) == 1
        assert not driver.tokens["sick"]


def test_an_arena_that_cannot_hold_the_longest_sequence_is_refused(models: Models) -> None:
    settings = fp32_settings(memory_bytes=20_000)
    with pytest.raises(ConfigError, match="too small for a sequence of 128 tokens and an adapter"):
        build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)


def test_sequences_longer_than_the_model_was_made_for_are_refused(models: Models) -> None:
    settings = fp32_settings()
    settings = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, max_model_len=129))
    with pytest.raises(ConfigError, match="129 is more than the model's 128"):
        build_torch_executor(settings, models.folder, lambda *_: None, lambda: None)


def test_default_arena_has_room_for_adapters_and_every_sequence(models: Models) -> None:
    with driving(models.folder, memory_bytes=0, max_num_seqs=2) as driver:
        sizes = driver.sizes
        assert sizes.max_model_len == 128
        assert sizes.total_blocks * sizes.block_bytes <= 4 * 2**30
        assert sizes.max_adapter_blocks == sizes.total_blocks - 32 > 0
        assert sizes.kernels.startswith("native")
