"""Decode steps as graphs give the tokens of eager steps, on a device that runs late, without waiting for it."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import KernelForm, SequenceStep, StepPlan, Token
from lorikeet.kernels.lora import LoraBatch, split_segments
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.kernels.triton import attention_launch
from lorikeet.kernels.triton.kernels import TritonKernels
from lorikeet.worker import decode_graphs, torch_executor
from lorikeet.worker.decode_graphs import DecodeGraphs, padded_rows
from lorikeet.worker.torch_executor import EagerRunner, GraphRunner
from lorikeet.worker.transfer import transfers
from tests.support.driver import Driver, Models, driving, make_models, random_tokens
from tests.support.late_device import LateDevice, LateMark, steps_seen_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), num_hidden_layers=1)  # the interpreter is slow


@contextmanager
def late(models: Models, **engine: Any) -> Iterator[tuple[Driver, LateDevice]]:
    """Drive an executor on a late device, by the Triton kernels."""
    device = LateDevice()
    given = {"kernels": "triton", "max_num_seqs": 6, **engine}
    with pytest.MonkeyPatch.context() as patch, steps_seen_by(device):
        patch.setattr(transfers, "device_at", lambda place: device)
        with driving(models.folder, **given) as driver:
            yield driver, device


def serve(driver: Driver, models: Models, repeat: int, *params: dict[str, Any]) -> dict[str, list[int]]:
    """Decode sequences with and without adapters, some of which come and go."""
    narrow, attention, _ = models.adapters.values()
    driver.load(narrow, attention)
    for i, (adapter, given) in enumerate(zip((None, narrow, attention), params, strict=True)):
        driver.add(f"r{i}", random_tokens(3 + i, seed=i), adapter, **given)
    driver.step({"r0": 3, "r1": 4, "r2": 5})
    driver.decode(["r0", "r1", "r2"], 4, repeat)
    driver.drop("r1")
    driver.decode(["r0", "r2"], 2, 2)
    driver.drop("r2")
    driver.decode(["r0"], 2, 2)
    return {name: driver.token_ids(name) for name in ("r0", "r1", "r2")}


DRAWN = {"temperature": 1.0, "seed": 5}
FILTERED = {"temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
EDITED = {"frequency_penalty": 0.7, "temperature": 1.0, "seed": 5, "logprobs": 2}


@pytest.mark.parametrize(
    "params", [(FILTERED, DRAWN, FILTERED), (EDITED, EDITED, EDITED)], ids=["on the device", "edited by the host"]
)
def test_replayed_steps_choose_the_tokens_of_called_ones(models: Models, params: tuple[dict[str, Any], ...]) -> None:
    with late(models) as (driver, device):
        replayed = serve(driver, models, 4, *params)
    assert device.faults == []
    assert (device.replayed, device.replays) == (8, 8)
    with driving(models.folder, kernels="native") as driver:
        assert serve(driver, models, 2, *params) == replayed


def test_log_probabilities_are_of_the_step_that_chose(models: Models) -> None:
    def told(driver: Driver) -> list[Token]:
        driver.add("a", random_tokens(3, seed=1), logprobs=2)
        driver.step({"a": 3})
        driver.decode(["a"], 3, repeat=3)
        return driver.tokens["a"]

    with late(models) as (driver, device):
        replayed = told(driver)
    assert device.replays == 3
    with driving(models.folder, kernels="native") as driver:
        for found, right in zip(replayed, told(driver), strict=True):
            assert found.token_id == right.token_id
            assert found.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in right.top]


def test_padded_adapters_have_a_graph_of_their_own_and_the_same_tokens(models: Models) -> None:
    narrow, attention, _ = models.adapters.values()
    with late(models) as (driver, device):
        driver.load(narrow, attention)
        for form in (KernelForm.PADDED, KernelForm.UNPADDED):
            names = [f"{form}{i}" for i in range(2)]
            for name, adapter in zip(names, (narrow, attention), strict=True):
                driver.add(name, random_tokens(1, seed=1), adapter)
            driver.step(dict.fromkeys(names, 1), kernel_form=form)
            driver.step(dict.fromkeys(names, 1), repeat=2, kernel_form=form)
        padded, plain = ([driver.token_ids(f"{form}{i}") for i in range(2)] for form in ("padded", "unpadded"))
    assert padded == plain
    assert device.graphs == 2
    assert device.faults == []


def test_long_contexts_have_a_graph_of_their_own_and_the_same_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "LONG_TOKENS", 16)
    monkeypatch.setattr(attention_launch, "LONG_TOKENS", 16)
    monkeypatch.setattr(attention_launch, "_LONG_SPLIT", 8)

    def told(driver: Driver) -> list[int]:
        driver.add("a", random_tokens(12, seed=1))
        driver.step({"a": 12})
        for _ in range(4):
            driver.step({"a": 1}, repeat=2)
        return driver.token_ids("a")

    with late(models) as (driver, device):
        replayed = told(driver)
    assert (device.graphs, device.faults) == (2, [])
    with driving(models.folder, kernels="native") as driver:
        assert told(driver) == replayed


def test_adapters_of_a_running_step_are_kept_until_it_ends(models: Models) -> None:
    narrow = next(iter(models.adapters.values()))
    with late(models) as (driver, device):
        driver.load(narrow)
        driver.add("a", random_tokens(4, seed=1), narrow)
        driver.step({"a": 4})
        assert driver.step({"a": 1}, 3, overlapped=True).next_runs
        weights = weakref.ref(driver.executor.transfers.adapters.weights(narrow.digest))
        driver.executor.execute(StepPlan(99, drops=(RequestId("a"),), evictions=(narrow.digest,)))
        assert device.replays == device.replayed + 1, "it runs"
        assert weights() is not None, "its table is free"


def test_segments_of_many_rows_are_cut_and_graphs_have_room_for_few() -> None:
    assert split_segments([(0, 16, 7, 8), (20, 53, 9, 10)], 16) == [
        (0, 16, 7, 8),
        (20, 36, 9, 10),
        (36, 52, 9, 10),
        (52, 53, 9, 10),
    ]
    assert [decode_graphs._segment_rows(longest) for longest in (1, 2, 17)] == [1, 16, 16]
    lora = LoraBatch.from_table(torch.zeros(0, 4), KernelForm.UNPADDED, frozenset("q"), 65, 5, is_aligned=True)
    of = decode_graphs._Variant.of
    assert [of(60, lora, count).segments for count in (1, 8, 9, 33, 60)] == [8, 8, 32, 64, 64]
    assert (of(60, lora, 1).ranks, of(3, lora, 3).segments, of(3, lora, 3).segment_rows) == (128, 4, 16)
    padded = LoraBatch.from_table(torch.zeros(0, 4), KernelForm.PADDED, frozenset("q"), 65, 0, is_aligned=True)
    assert of(60, padded, 1).ranks == 65


def test_blocks_of_the_last_step_are_looked_for_before_the_first(models: Models) -> None:
    with late(models) as (driver, device):
        driver.add("a", random_tokens(4, seed=1))
        driver.step({"a": 4})
        step = SequenceStep(RequestId("a"), 4, 1, (BlockId(0),), samples=True)
        with pytest.raises(ExecutorError, match="9 tokens do not fit its 2 blocks"):
            driver.execute(StepPlan(9, sequences=(step,), repeat=5))
        assert device.replays == 0


def test_a_plan_whose_steps_sample_nothing_ends_when_they_are_done(models: Models) -> None:
    with late(models) as (driver, device):
        driver.add("a", random_tokens(6, seed=1))
        driver.step({"a": 4})
        assert device.steps_in_flight == 0
        driver.step({"a": 2})
        assert len(driver.token_ids("a")) == 1


def test_graphs_can_be_switched_off(models: Models) -> None:
    with late(models, enforce_eager=True) as (driver, device):
        driver.add("a", random_tokens(2, seed=1))
        driver.step({"a": 2})
        driver.decode(["a"], 1)
    assert device.graphs == device.replays == 0


def test_a_graph_serves_any_mix_of_adapters(models: Models) -> None:
    _, attention, wide = models.adapters.values()
    with late(models) as (driver, device):
        driver.load(attention, wide)
        for name, adapter in (("a", attention), ("b", wide), ("c", wide), ("d", None)):
            driver.add(name, random_tokens(2, seed=1), adapter)
        driver.step(dict.fromkeys("abcd", 2))
        graphs = device.graphs
        for names in ("bd", "ab"):
            driver.decode([*names], 1)
        assert device.graphs == graphs + 1
        driver.decode([*"bc"], 1)
        assert device.graphs == graphs + 2, "two rows of one adapter are not for the kernels of one row"
        driver.decode([*"ad"], 1)
        assert device.graphs == graphs + 3, "modules that no adapter touches are the base model's exact path"
        driver.decode([*"abcd"], 1)
        assert device.graphs == graphs + 4
    assert device.faults == []


def test_the_next_step_begins_before_the_tokens_of_the_last_are_there(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    wait = LateMark.wait

    def noted(self: LateMark) -> None:
        seen.append((self.device.replays, self.device.replayed))
        wait(self)

    with late(models) as (driver, device):
        driver.add("a", random_tokens(4, seed=1))
        driver.step({"a": 4})
        monkeypatch.setattr(LateMark, "wait", noted)
        driver.decode(["a"], 4, repeat=4)
    assert seen[:4] == [(2, 0), (3, 1), (4, 2), (4, 3)], "(begun, done) whenever the host waits"
    assert device.faults == []


def test_a_launched_step_is_used_for_the_remaining_sequences(models: Models) -> None:
    with late(models) as (driver, _):
        driver.add("free", random_tokens(7, seed=1))
        driver.step({"free": 7})
        driver.decode(["free"], 8)
        free = driver.token_ids("free")
        stop = free[3]
        steps_to_stop = free.index(stop, 1)
        driver.add("stopped", random_tokens(7, seed=1), stop_token_ids=(stop,))
        driver.add("other", random_tokens(5, seed=2))
        driver.step({"stopped": 7, "other": 5})
        result = driver.step({"stopped": 1, "other": 1}, repeat=8)
        assert result.steps_run == steps_to_stop + 1
        assert [len(tokens) for tokens in result.tokens] == [steps_to_stop, steps_to_stop + 1]
        assert driver.token_ids("stopped") == free[: steps_to_stop + 1]
        driver.drop("stopped")
        driver.decode(["other"], 2)
        together = driver.token_ids("other")
        driver.add("alone", random_tokens(5, seed=2))
        driver.step({"alone": 5})
        driver.decode(["alone"], len(together) - 1)
        assert driver.token_ids("alone") == together


def test_an_overlapped_plan_returns_after_each_step_while_the_next_runs(models: Models) -> None:
    with late(models) as (driver, device):
        for i, name in enumerate(("a", "b", "unhurried a", "unhurried b")):
            driver.add(name, random_tokens(3 + i % 2, seed=i % 2), temperature=1.0, seed=5)
        driver.step({"a": 3, "b": 4, "unhurried a": 3, "unhurried b": 4})
        both = {"a": 1, "b": 1}
        for continues, repeat in ((False, 4), (True, 3), (True, 2)):
            result = driver.step(both, repeat, overlapped=True, continues=continues)
            assert (result.steps_run, result.next_runs) == (1, True)
            assert device.replays == device.replayed + 1
        result = driver.step({"b": 1}, overlapped=True, continues=True)
        assert (result.steps_run, result.next_runs) == (1, False)
        assert device.replays == device.replayed == 4
        driver.decode(["unhurried a", "unhurried b"], 4)
        assert driver.token_ids("a") == driver.token_ids("unhurried a")[:4]
        assert driver.token_ids("b") == driver.token_ids("unhurried b")
    assert device.faults == []


def test_a_step_that_ran_already_counts_from_the_end_of_the_last(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    with late(models) as (driver, _):
        driver.add("a", random_tokens(3, seed=1))
        driver.step({"a": 3})
        monkeypatch.setattr(torch_executor, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
        took_s = [driver.step({"a": 1}, 3 - i, overlapped=True, continues=i > 0).duration_s for i in range(3)]
        assert sum(took_s) == next(ticks) - 1


@pytest.mark.parametrize("then", ["others decode", "others prefill", "nothing"])
def test_an_abandoned_step_is_dropped(models: Models, then: str) -> None:
    with late(models) as (driver, device):
        for name in ("left", "other", "unhurried"):
            driver.add(name, random_tokens(4, seed=1))
        driver.step({"left": 4, "unhurried": 4})
        driver.decode(["unhurried"], 3)
        assert driver.step({"left": 1}, 3, overlapped=True).next_runs
        driver.drop("left")
        if then != "nothing":
            driver.step({"other": 3 if then == "others prefill" else 4})
            driver.step({"other": 1}, 3 if then == "others decode" else 1)
            driver.decode(["other"], 3)
            assert driver.token_ids("other")[:4] == driver.token_ids("unhurried")
    assert device.replays == device.replayed, "closing waits for what runs"
    assert device.faults == []


def test_plan_needing_the_host_returns_with_no_step_in_flight(models: Models) -> None:
    with late(models) as (driver, _):
        driver.add("a", random_tokens(3, seed=1), **EDITED)
        driver.step({"a": 3})
        result = driver.step({"a": 1}, 3, overlapped=True)
        assert (result.steps_run, result.next_runs) == (1, False)


def test_a_row_that_is_not_finite_fails_alone(models: Models) -> None:
    with late(models) as (driver, device):
        for name in ("sick", "sound"):
            driver.add(name, random_tokens(4, seed=1))
        driver.step({"sick": 4, "sound": 4})
        kv = driver.executor._rank._kv
        sick = driver.executor._rank.sequence("sick").blocks.values[0]  # type: ignore[arg-type]
        kv[:, int(sick)] = torch.nan
        result = driver.step({"sick": 1, "sound": 1}, repeat=4)
    assert set(result.failed) == {"sick"}
    assert result.steps_run == 2, "the second had begun"
    assert [len(tokens) for tokens in result.tokens] == [0, 2]
    assert device.faults == []


def test_only_decodes_whose_kernels_fit_are_replayed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []
    for kind in (EagerRunner, GraphRunner):
        launch = kind.launch

        def noted(self: Any, kind: Any = kind, launch: Any = launch) -> None:
            kinds.append(kind)
            launch(self)

        monkeypatch.setattr(kind, "launch", noted)
    with late(models) as (driver, _):
        driver.add("a", random_tokens(4, seed=1))
        driver.step({"a": 3})
        driver.step({"a": 1})
        driver.add("b", random_tokens(4, seed=2))
        driver.step({"a": 1, "b": 4})
        driver.step({"a": 1, "b": 1})
    assert kinds == [EagerRunner, GraphRunner, EagerRunner, GraphRunner]
    assert not StepPlan(0, kernel_form=KernelForm.EINSUM).fits_graphs
    assert StepPlan(0, kernel_form=KernelForm.EINSUM, merged=AdapterDigest("a")).fits_graphs, "as the base model"
    with late(models, kernels="native") as (driver, device):
        driver.add("a", random_tokens(4, seed=1))
        driver.step({"a": 4})
        driver.decode(["a"], 1)
    assert device.replays == 0


def test_kernels_that_wait_would_be_seen(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "attention", ReferenceKernels.attention)
    with late(models) as (driver, device):
        driver.add("a", random_tokens(4, seed=1))
        driver.step({"a": 4})
        driver.decode(["a"], 2)
    assert any("waits for the device: tolist" in fault for fault in device.faults)


def test_tokens_that_are_read_too_early_would_be_seen(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        with late(models) as (driver, _):
            driver.add("a", random_tokens(2, seed=1), temperature=1.0, seed=5)
            driver.step({"a": 2})
            driver.decode(["a"], 4, repeat=4)
            return driver.token_ids("a")

    right = tokens()

    def take(self: DecodeGraphs) -> list[int]:
        """Return what is there by now."""
        at = (self._launched - len(self._inflight)) % len(self._received)
        self._inflight.popleft()
        found: list[int] = self._received[at, : self._rows].tolist()
        return found

    monkeypatch.setattr(DecodeGraphs, "take", take)
    assert tokens() != right


def test_rows_that_fill_a_graph_store_nothing(models: Models) -> None:
    with late(models) as (driver, _):
        arena = driver.executor._rank._kv
        for name in ("a", "b", "c"):
            driver.add(name, random_tokens(4, seed=1))
        driver.step({"a": 4, "b": 4, "c": 4})
        before = arena.clone()
        driver.step({"a": 1, "b": 1, "c": 1})
        changed = {int(block) for block in (arena != before).flatten(2).any(-1).any(0).nonzero().flatten()}
        own = {int(driver.executor._rank.sequence(name).blocks.values[-1]) for name in ("a", "b", "c")}  # type: ignore[arg-type]
    assert changed == own


@pytest.mark.parametrize(
    ("rows", "padded"), [(1, 1), (3, 4), (8, 8), (9, 16), (64, 64), (65, 96), (129, 192), (600, 640)]
)
def test_graphs_have_few_sizes(rows: int, padded: int) -> None:
    assert padded_rows(rows) == padded
    assert len({padded_rows(rows) for rows in range(1, 257)}) <= 12
    assert decode_graphs.padded_rows(padded) == padded
