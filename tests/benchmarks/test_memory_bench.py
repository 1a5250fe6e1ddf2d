"""Rows of the memory, on the modelled executor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.memory import app, split_presets
from benchmarks.memory_bench import MemorySetting, PresetRun, modelled_rig, preset_figures, run_preset
from benchmarks.memory_watch import TtftParts
from benchmarks.memory_work import (
    MemoryWork,
    WorkOptions,
    least_memory_bytes,
    make_work,
    working_set,
)
from benchmarks.plots import pool_areas
from lorikeet.core.events import RequestTimings
from lorikeet.costs.profile import write_profile
from lorikeet.workloads.synthetic import adapters_by_name
from lorikeet.workloads.workload import OptionError, WorkloadRequest, write_workload
from tests.support.profiles import GEOMETRY, round_profile

DATA = Path(__file__).parents[1] / "workloads" / "data"
BLOCK_BYTES = GEOMETRY.block_bytes(16)
runner = CliRunner(env={"COLUMNS": "250"})


def options(**changes: Any) -> WorkOptions:
    given = {"source": "conversations", "requests": 40, "rate": 2.0, "adapters": 5, "ranks": (1, 2), "modules": ("q",)}
    return WorkOptions(**{**given, "prefix_block_tokens": 16, **changes})


def small_work(*requests: WorkloadRequest, names: tuple[str, ...] = ("a", "b")) -> MemoryWork:
    return MemoryWork(list(requests), names, block_size=16, seed=0)


def modelled(preset: str, work: MemoryWork, blocks: int, host_blocks: int = 0) -> PresetRun:
    rig = modelled_rig(round_profile(), work, options())
    setting = MemorySetting(
        memory_bytes=blocks * BLOCK_BYTES,
        host_memory_bytes=host_blocks * BLOCK_BYTES,
        max_model_len=work.longest_tokens,
    )
    return run_preset(rig, setting.settings(preset), work)


def test_a_made_workload_has_whole_conversations_at_its_rate() -> None:
    work = make_work(options())
    assert 40 <= len(work.requests) < 60
    assert work.names == tuple(f"adapter-{i:04d}" for i in range(5))
    times_s = [request.arrival_s for request in work.requests]
    assert (len(times_s) - 1) / (times_s[-1] - times_s[0]) == pytest.approx(2.0)
    turns = [request.conversation for request in work.requests]
    assert min(turns.count(name) for name in set(turns)) >= 3


def test_a_trace_of_conversations_is_shortened_and_gets_adapters() -> None:
    work = make_work(
        options(source=str(DATA / "mooncake_conversation_excerpt.jsonl"), prefix_block_tokens=None, rate=None)
    )
    assert work.block_size == 16
    adapters = {request.conversation: request.adapter for request in work.requests}
    assert all(adapters[request.conversation] == request.adapter is not None for request in work.requests)


def test_a_workload_keeps_its_own_adapters_and_its_requests_for_the_base(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_workload(file, [WorkloadRequest(0.5, "x", 5, 3), WorkloadRequest(1.5, None, 5, 3)])
    work = make_work(options(source=str(file), requests=None, rate=None, adapters=3))
    assert [(request.arrival_s, request.adapter) for request in work.requests] == [(0.5, "x"), (1.5, None)]
    assert work.names == ("adapter-0000", "adapter-0001", "x")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("chat", "needs a trace of conversations"),
        ("nowhere.jsonl", "'nowhere.jsonl' is neither a file nor a shape"),
    ],
)
def test_a_workload_that_there_is_not_is_named(source: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        make_work(options(source=source))


def test_too_few_adapters_are_named(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_workload(file, [WorkloadRequest(0.5, "x", 5, 3), WorkloadRequest(1.5, "y", 5, 3)])
    with pytest.raises(OptionError, match="names 2 adapters"):
        make_work(options(source=str(file), adapters=1))
    file.write_text("")
    with pytest.raises(OptionError, match="has no requests"):
        make_work(options(source=str(file)))


def test_working_set_counts_shared_prefixes_once_and_requested_adapters() -> None:
    # Two turns of one conversation: 40 + 30 tokens, then 100 + 5; 104 of them have KV. Under b nothing is shared.
    work = small_work(
        WorkloadRequest(0.0, "a", 40, 30, (0, 1, 2), "c"),
        WorkloadRequest(1.0, "a", 100, 5, (0, 1, 3, 4, 5, 6, 7), "c"),
        WorkloadRequest(2.0, "b", 32, 1, (0, 1)),
        names=("a", "b", "idle"),
    )
    adapters = adapters_by_name(work.names, (1, 8), GEOMETRY, modules=("q",))
    found = working_set(work, adapters, GEOMETRY, 16)
    # A rank preset of q takes 16 elements a layer: ranks 1 and 8 fit one block each, of 256 elements.
    assert found.adapter_bytes == 2 * BLOCK_BYTES
    assert found.kv_bytes == (6 + 2) * BLOCK_BYTES
    assert found.total_bytes == 10 * BLOCK_BYTES
    assert (found.all_adapter_bytes, found.host_bytes) == (3 * BLOCK_BYTES, 11 * BLOCK_BYTES)
    assert least_memory_bytes(work, adapters, GEOMETRY, 16) == 2 * (1 + 7 + 1) * BLOCK_BYTES


@pytest.mark.slow
def test_hits_are_shares_of_what_a_cache_that_forgets_nothing_would_find() -> None:
    work = small_work(
        WorkloadRequest(0.0, "a", 40, 30, (0, 1, 2), "c"),
        WorkloadRequest(5.0, "a", 100, 5, (0, 1, 3, 4, 5, 6, 7), "c"),
        WorkloadRequest(9.0, "b", 40, 2, (0, 1, 2)),
    )
    roomy = preset_figures("kept", modelled("lorikeet:plain", work, 80))
    assert roomy["completed"] == 3
    assert roomy["kv_hit_rate"] == 1.0
    assert roomy["adapter_hit_rate"] == pytest.approx(1 / 3)
    assert roomy["hit_rate"] == pytest.approx(2 / 3)
    assert roomy["invalid_kv_share"] == 0.0
    dropped = preset_figures("dropped", modelled("lorikeet:plain-no-reuse", work, 80))
    assert dropped["kv_hit_rate"] == 0.0


@pytest.mark.slow
def test_the_parts_of_ttft_add_up_to_it() -> None:
    work = make_work(options())
    preset = modelled("elora", work, 100, 1000)
    ttft_s = [exchange.ttft_s for exchange in preset.run.exchanges]
    assert sorted(sum(parts) for parts in preset.parts) == pytest.approx(sorted(value or 0.0 for value in ttft_s))
    figures = preset_figures("elora", preset)
    assert sum(figures["ttft_parts_s"].values()) == pytest.approx(figures["ttft_mean_s"])
    assert all(part >= -1e-9 for parts in preset.parts for part in parts)


def test_a_request_that_never_began_has_no_parts() -> None:
    assert TtftParts.of(RequestTimings(1.0)) is None
    timings = RequestTimings(1.0, admitted_s=2.0, first_token_s=5.0, adapter_wait_s=0.5, kv_wait_s=0.25)
    assert TtftParts.of(timings) == (1.0, 0.5, 0.25, 2.25)


@pytest.mark.slow
def test_what_fills_the_device_adds_up_at_every_sample() -> None:
    preset = modelled("elora", make_work(options()), 100, 1000)
    assert len(preset.samples) > 10
    assert [sample.at_s for sample in preset.samples] == sorted(sample.at_s for sample in preset.samples)
    for sample in preset.samples:
        for tier in (sample.device, sample.host):
            parts = (tier.free, tier.adapters, tier.kv_running, tier.kv_cached, tier.inflight)
            assert sum(parts) == tier.total


@pytest.mark.slow
def test_the_host_tier_is_filled_before_the_first_request() -> None:
    preset = modelled("lorikeet:plain", make_work(options()), 100, 1000)
    assert preset.samples[0].host.adapters == 5 * BLOCK_BYTES
    assert preset.began.transfers["source-host"].transfers == 5
    assert preset_figures("x", preset)["transfers"]["source-host"]["transfers"] == 0


@pytest.mark.slow
def test_the_plot_has_a_panel_for_each_row_and_stays_inside_it() -> None:
    preset = modelled("elora", make_work(options()), 100, 1000)
    svg = pool_areas("a < b", [("elora", preset.samples), ("nothing", ())])
    assert svg.startswith("<svg")
    assert "a &lt; b" in svg
    assert svg.count("<polygon") == 4
    heights = [float(point.split(",")[1]) for part in svg.split('points="')[1:] for point in part.split('"')[0].split()]
    assert np.min(heights) >= 60 - 0.1


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "round.toml"
    write_profile(round_profile(), file)
    return str(file)


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments))


SMALL = "conversations --adapters 4 --requests 20 --ranks 1,2 --modules q --executor modelled".split()


@pytest.mark.slow
def test_the_command_prints_one_result_for_each_preset(profile: str, tmp_path: Path) -> None:
    plot = tmp_path / "pool.svg"
    result = invoke(
        *SMALL, "--profile", profile, "--presets", "elora, elora:s-lora", "--json", "-", "--plot", str(plot)
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [preset["preset"] for preset in report["results"]] == ["elora", "elora:s-lora"]
    for preset in report["results"]:
        assert preset["completed"] == preset["requests"] >= 20
        for name in ("ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "invalid_kv_share", "kv_hit_rate", "adapter_hit_rate"):
            assert isinstance(preset[name], float)
    assert report["setup"]["setting"]["memory_bytes"] <= report["setup"]["setting"]["host_memory_bytes"]
    assert plot.read_text().startswith("<svg")


@pytest.mark.slow
def test_the_command_prints_tables(profile: str) -> None:
    result = invoke(*SMALL, "--profile", profile, "--presets", "elora", "--link-gb-per-s", "0.001")
    assert result.exit_code == 0, result.output
    assert "link 0.001 GB/s; modelled by" in result.stdout
    assert "invalid" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "'nowhere' is neither a file nor a shape"),
        (["agent", "--presets", "vllm"], "unknown preset 'vllm'"),
        (["agent", "--presets", ""], "name presets"),
        (["agent", "--presets", "adapter_share=0.3"], "comes before any preset"),
        (["agent", "--ranks", "big"], "'big' is not a rank"),
        (["agent", "--modules", "q,z"], "--modules 'q,z'"),
        (["agent", "--rate", "0"], "--rate 0 is not positive"),
        (["agent", "--memory", "lots"], "'lots' is not a size"),
        (["agent", "--memory", "0"], "--memory 0: the pool must hold at least one request"),
        (["agent", "--executor", "modelled", "--profile", "x", "--threads", "2"], "--threads: without effect here"),
        (["agent", "--adapter-choice", "fair"], "adapter choice 'fair'"),
        (["agent", "--executor", "paced"], "neither torch nor modelled"),
        (["agent", "--executor", "modelled"], "go together"),
        (["agent", "--profile", "x"], "go together"),
        (["agent", "--executor", "modelled", "--profile", "nowhere"], "unknown profile 'nowhere'"),
        (["agent", "--plot", "/nowhere/x.svg"], "there is no folder"),
        (["agent", "--model", "/nowhere"], "no such folder"),
    ],
)
def test_what_cannot_be_is_named_with_code_2(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr


@pytest.mark.slow
def test_the_command_runs_on_real_arithmetic(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    first = WorkloadRequest(0.0, "a", 40, 8, (), "talk")
    write_workload(file, [first, WorkloadRequest(0.01, "b", 30, 4), WorkloadRequest(0.02, "a", 80, 4, (), "talk")])
    flags = f"{file} --adapters 2 --ranks 2 --dtype float32 --threads 1 --json - --presets lorikeet:plain"
    flags += f" --model {model_folder} --host-memory 1MiB"
    result = invoke(*flags.split())
    assert result.exit_code == 0, result.output
    (preset,) = json.loads(result.stdout)["results"]
    assert preset["completed"] == preset["requests"] == 3
    assert preset["cached_share"] == pytest.approx(32 / 150)
    assert preset["transfers"]["host-device"]["transfers"] >= 2


@pytest.mark.slow
def test_what_warms_up_fits_a_workload_of_short_requests(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_workload(file, [WorkloadRequest(0.0, "a", 5, 2)])
    flags = f"{file} --adapters 1 --ranks 2 --dtype float32 --threads 1 --json - --presets lorikeet:plain"
    result = invoke(*flags.split(), "--model", str(model_folder), "--memory", "1MiB", "--host-memory", "1MiB")
    assert result.exit_code == 0, result.output
    (preset,) = json.loads(result.stdout)["results"]
    assert preset["completed"] == 1


def test_a_memory_too_small_is_named(profile: str) -> None:
    result = invoke(*SMALL, "--profile", profile, "--presets", "elora", "--memory", "1KiB")
    assert result.exit_code == 2
    assert "is too small for a sequence" in result.stderr


def test_axes_belong_to_the_row_before_them() -> None:
    assert split_presets("dlora,batching=dlora(patience=64,tuned=false),elora") == [
        "dlora,batching=dlora(patience=64,tuned=false)",
        "elora",
    ]
    assert split_presets("elora, vllm-static,adapter_share=0.35,host_kv=none ,x") == [
        "elora",
        "vllm-static,adapter_share=0.35,host_kv=none",
        "x",
    ]
