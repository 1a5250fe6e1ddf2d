"""Several ranks give the tokens of one, and a rank that dies causes an error, not a hang."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.adapters.store import reference
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import Tier
from lorikeet.models.config import read_model_config
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.parallel import DistributedRankGroup
from lorikeet.worker import tensor_parallel
from lorikeet.worker.tensor_parallel import RankFailed, RankProcesses
from lorikeet.worker.torch_executor import build_torch_executor
from lorikeet.worker.transfer.finished import TransferWork
from tests.models.checkpoints import make_checkpoint
from tests.models.peft_family import LLAMA_LIKE, make
from tests.support.driver import (
    ALL,
    Driver,
    Latch,
    driving,
    fp32_settings,
    make_adapter,
    peer_tokens,
    random_tokens,
)
from tests.worker.rank_runs import make_model, run_everything

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("kv_heads", "ranks"), [(2, 2), (1, 2), pytest.param(2, 4, marks=pytest.mark.long)])
def test_tensor_parallel_ranks_give_the_tokens_of_one(tmp_path: Path, kv_heads: int, ranks: int) -> None:
    folder, adapters = make_model(tmp_path, num_key_value_heads=kv_heads)
    with driving(folder) as alone:
        expected = run_everything(alone, adapters)
    with driving(folder, tensor_parallel=ranks) as together:
        assert run_everything(together, adapters) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_pipeline_stages_give_the_tokens_of_one(tmp_path: Path, ranks: int, stages: int) -> None:
    folder, adapters = make_model(tmp_path, num_hidden_layers=4)
    with driving(folder) as alone:
        expected = run_everything(alone, adapters)
    with driving(folder, tensor_parallel=ranks, pipeline_parallel=stages) as together:
        assert together.sizes.local_geometry.layers == 4 // stages
        assert run_everything(together, adapters) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


def test_an_adapter_of_one_stage_takes_the_same_blocks_of_every_stage(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path, num_hidden_layers=4)
    geometry = read_model_config(folder).geometry(4)
    early, late = (
        make_adapter(folder, tmp_path / name, geometry, seed, r=8, target_modules=ALL, layers_to_transform=layers)
        for name, seed, layers in (("early", 3, [0]), ("late", 4, [2, 3]))
    )
    prompt = random_tokens(9, seed=3)
    with driving(folder, pipeline_parallel=2, host_memory_bytes=2**21) as driver:
        for ref in (early, late):
            blocks = tuple(BlockId(block) for block in range(driver.blocks_of(ref)))
            for source, target in ((Tier.SOURCE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
                (done,) = driver.move(driver.transfer(source, target, ref, blocks))
                assert done.error is None
        for ref in (early, late):
            driver.add(ref.name, prompt, ref)
        driver.step({early.name: 9, late.name: 9})
        driver.decode([early.name, late.name], 8)
        for ref in (early, late):
            assert driver.token_ids(ref.name) == peer_tokens(folder, ref, prompt, 9)


KINDS = (
    "DoRA with biases",
    "LoRA with biases",
    "all biases",
    "whole norms",
    "trained tokens",
    "LoRA on the vocabulary",
)


@pytest.mark.parametrize(
    ("variant", "ranks"), [("qwen3-biases", 2), pytest.param("llama-biases", 4, marks=pytest.mark.long)]
)
def test_tensor_parallel_ranks_serve_adapters_with_extras(variant: str, ranks: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", variant, vocab_size=96)
    geometry = read_model_config(tmp_path / "base").geometry(4)
    adapters = {}
    for name in KINDS:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        make(base, tmp_path / name, LLAMA_LIKE[name]())
        adapters[name] = reference(name, tmp_path / name, geometry)

    def run(driver: Driver) -> dict[str, list[int]]:
        assert [done.error for done in driver.load(*adapters.values())] == [None] * len(adapters)
        for index, name in enumerate(("base", *adapters)):
            driver.add(name, random_tokens(8 + index, seed=7), adapters.get(name))
        driver.step({name: 8 + index for index, name in enumerate(("base", *adapters))})
        driver.decode(["base", *adapters], 6)
        return {name: driver.token_ids(name) for name in ("base", *adapters)}

    with driving(tmp_path / "base", memory_bytes=2**22) as alone:
        expected = run(alone)
    with driving(tmp_path / "base", memory_bytes=2**22, tensor_parallel=ranks) as together:
        assert run(together) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_and_adapters_come_back_from_the_host_of_every_rank(tmp_path: Path, ranks: int) -> None:
    folder, adapters = make_model(tmp_path)
    wide = adapters["wide"]
    prompt = random_tokens(9, seed=3)
    with driving(folder, tensor_parallel=ranks, host_memory_bytes=2**21) as driver:
        host = [BlockId(block) for block in range(driver.sizes.host_blocks)]
        read = tuple(host[: driver.blocks_of(wide)])
        rest = host[driver.blocks_of(wide) :]
        for source, target in ((Tier.SOURCE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
            (done,) = driver.move(driver.transfer(source, target, wide, read))
            assert done.error is None
        driver.add("a", prompt, wide)
        driver.step({"a": 9})
        driver.decode(["a"], 3)
        held = driver.held_blocks()
        away = tuple(rest[: len(held)])
        nothing = tuple(rest[len(held) : 2 * len(held)])
        driver.copy(Tier.HOST, away, held)
        driver.copy(Tier.DEVICE, nothing, held)
        driver.copy(Tier.DEVICE, away, held)
        driver.decode(["a"], 8)
        assert driver.token_ids("a") == peer_tokens(folder, wide, prompt, 12)
        kinds = {worker.work for worker in driver.executor.transfers.counts.by_thread()}
        threads = {worker.thread for worker in driver.executor.transfers.counts.by_thread()}
        assert kinds == set(TransferWork)
        assert threading.get_native_id() not in threads


def test_a_load_counts_as_done_when_every_rank_has_it_and_one_failure_fails_it(tmp_path: Path) -> None:
    folder, adapters = make_model(tmp_path)
    woken = Latch()
    with driving(folder, woken, tensor_parallel=2) as driver:
        shutil.copytree(adapters["wide"].folder, tmp_path / "missing")
        missing = msgspec.structs.replace(adapters["wide"], folder=str(tmp_path / "none"), digest="missing")
        (done,) = driver.load(missing)
        assert str(tmp_path / "none") in (done.error or "")
        assert woken.wait()
        (done,) = driver.load(adapters["wide"])
        assert done.error is None
        driver.add("a", random_tokens(5, seed=1), adapters["wide"])
        driver.step({"a": 5})
        assert len(driver.tokens["a"]) == 1


def test_dead_rank_is_an_error_and_wakes_waiting_calls(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    woken = Latch()
    with driving(folder, woken, tensor_parallel=2) as driver:
        driver.add("a", random_tokens(5, seed=1))
        driver.step({"a": 5})
        (process,) = multiprocessing.active_children()
        os.kill(process.pid or 0, signal.SIGKILL)
        driver.executor.wait_for_transfer(None)
        assert woken.wait()
        with pytest.raises(ExecutorError, match="rank 1 has died"):
            driver.step({"a": 1})
        with pytest.raises(ExecutorError, match="rank 1 has died"):
            driver.executor.completed_transfers()
        with pytest.raises(ExecutorError, match="rank 1 has died"):
            driver.executor.read_host([BlockId(0)])


def test_a_rank_that_dies_during_a_step_ends_the_step(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    with driving(folder, tensor_parallel=2) as driver, ThreadPoolExecutor(1) as threads:
        driver.add("a", random_tokens(5, seed=1))
        (process,) = multiprocessing.active_children()
        os.kill(process.pid or 0, signal.SIGSTOP)
        step = threads.submit(driver.step, {"a": 5})
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(ExecutorError, match="rank 1 has died"):
            step.result(timeout=60)


def test_a_rank_that_breaks_during_a_step_is_an_error(tmp_path: Path) -> None:
    folder, adapters = make_model(tmp_path)
    with driving(folder, tensor_parallel=2) as driver:
        driver.add("a", random_tokens(5, seed=1), adapters["wide"])
        # Both ranks miss the adapter; what counts is that neither waits for the other for ever.
        with pytest.raises(ExecutorError, match="is used, but is not loaded"):
            driver.step({"a": 5})


def test_closing_ends_the_ranks(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    with driving(folder, tensor_parallel=2):
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []


def test_ranks_do_not_outlive_a_rank_0_that_is_killed(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    script = (
        "import multiprocessing, sys; from pathlib import Path; from tests.support.driver import driving\n"
        f"with driving(Path({str(folder)!r}), tensor_parallel=2):\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as rank_0:
        assert rank_0.stdout is not None
        rank_1 = int(rank_0.stdout.readline())
        assert psutil.pid_exists(rank_1)
        rank_0.kill()
        # Both, and the loader of each, write to this pipe: it ends when none of them is left.
        assert rank_0.stdout.read() == ""


def make_model_without_a_layer(tmp_path: Path) -> Path:
    folder, _ = make_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.num_hidden_layers = 4
    model.config.save_pretrained(folder)
    return folder


def test_a_rank_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    folder = make_model_without_a_layer(tmp_path)
    # Of this rank, or of the other one where that has gone before this one has met it.
    with pytest.raises((ValueError, ExecutorError), match=r"layers\.3\..* missing"):
        build_torch_executor(fp32_settings(tensor_parallel=2), folder, lambda *_: None, lambda: None)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_before_all_have_joined_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_without_a_layer(tmp_path)

    def meet(*arguments: Any, **named: Any) -> None:
        DistributedRankGroup(*arguments, **named).close()
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(tensor_parallel, "DistributedRankGroup", meet)
    with pytest.raises(ExecutorError, match=r"rank 1 did not start: .*(layers\.3\..* missing|connectFullMesh)"):
        build_torch_executor(fp32_settings(tensor_parallel=2), folder, lambda *_: None, lambda: None)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_before_arenas_are_allocated_is_reported() -> None:
    ranks = RankProcesses.__new__(RankProcesses)
    ours, theirs = multiprocessing.Pipe()
    ranks._connections = [ours]
    theirs.send_bytes(msgspec.msgpack.encode(RankFailed("no memory is left")))
    theirs.close()
    with pytest.raises(ExecutorError, match="rank 1 did not start: no memory is left"):
        ranks.allocate(100, 0)
    ours.close()


def test_heads_and_layers_that_do_not_divide_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    with pytest.raises(ModelConfigError, match="4 attention heads cannot be split over 3"):
        build_torch_executor(fp32_settings(tensor_parallel=3), folder, lambda *_: None, lambda: None)
    with pytest.raises(ModelConfigError, match="3 layers do not divide by 2 pipeline stages"):
        build_torch_executor(fp32_settings(pipeline_parallel=2), folder, lambda *_: None, lambda: None)
