"""Helpers of the benchmark programs, and short runs of those that need no other machine."""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, gpu, steps
from benchmarks.harness import in_turns, print_table, running_server
from benchmarks.papers import dlora, loraserve
from benchmarks.papers.measure import Answer, Paper, Run
from benchmarks.papers.runs import peak
from benchmarks.request_path import show
from lorikeet.profiling.model_shapes import MODEL_SHAPES
from lorikeet.workloads.synthetic import PAPER_RANKS
from tests.support import hostile_clients as hostile

SMALL = MODEL_SHAPES["llama-2-7b"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10240,
    "max_position_embeddings": 256,
}


SIZES: dict[str, Any] = {
    "ADAPTERS": 5,
    "PREFILL_TOKENS": 64,
    "PREFILL_SEQUENCES": 2,
    "PREFILLS": 2,
    "DECODES": ((1, 16), (4, 8)),
    "STEPS": 8,
    "LORA": ((2, 2, 16), (4, 4, 8)),
    "LOADS": 2,
    "LOADED_RANK": 8,
    "COLD_RANKS": (4,),
    "COLD_TOKENS": (8,),
    "COLD_REPEATS": 1,
}


def test_sides_run_in_turns_and_the_warm_up_does_not_count() -> None:
    order = []

    def side(name: str) -> Any:
        return lambda turn: order.append(f"{name}{turn}") or f"{name}{turn}"

    found = in_turns({"a": side("a"), "b": side("b")}, rounds=2)
    assert order == ["b0", "a0", "a1", "b1", "b2", "a2"]
    assert found == {"a": ["a1", "a2"], "b": ["b1", "b2"]}


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ["name", "ms"], [["a", 1.5], ["longer", 10]])
    assert capsys.readouterr().out == "title\n  name     ms\n  ------  ---\n  a       1.5\n  longer   10\n\n"


HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_benchmark_that_is_terminated_stops_its_server(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # so that a failure does not end this process
    try:
        with (
            pytest.raises(SystemExit),
            running_server([], tmp_path / "log", command=(sys.executable, "-c", HEALTHY)) as server,
        ):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.process.returncode == -signal.SIGTERM


def test_growth_counts_from_the_second_minute_on() -> None:
    samples = [(float(second), min(second, 60) * 10**6, 5 * 10**6 + second * 10**4) for second in range(901)]
    assert hostile.growth(samples) == "+0, +8"


def stream(*tokens: tuple[str, float], margin: float = 1.0) -> faults.Stream:
    return faults.Stream(tokens=list(tokens), margins=[margin] * len(tokens))


def test_streams_differ_by_text_or_log_probability_unless_at_a_tie() -> None:
    calm = stream(("a", -0.1), ("b", -0.2))
    assert faults.compare([calm], [stream(("a", -0.1), ("b", -0.2))]) == (0, 0)
    assert faults.compare([calm], [stream(("a", -0.1), ("c", -0.2))]) == (1, 0)
    assert faults.compare([calm], [stream(("a", -0.1), ("b", -0.3))]) == (1, 0)
    assert faults.compare([stream(("a", -0.1), margin=0.0)], [stream(("z", -0.1))]) == (0, 1)


def test_a_stream_is_read_event_by_event() -> None:
    read = faults.Stream()
    logprobs = {"content": [{"token": "hi", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]}]}
    read.take(json.dumps({"choices": [{"finish_reason": None, "logprobs": logprobs}]}))
    read.take(json.dumps({"choices": [{"finish_reason": "length"}]}))
    read.take("[DONE]")
    assert (read.tokens, read.margins, read.finish_reason, read.is_done) == ([("hi", -0.5)], [1.0], "length", True)


def test_files_of_a_path_are_counted_once_over_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    api, engine = Counter({("core/plan.py", "f"): 2}), Counter({("core/plan.py", "g"): 1, ("cli.py", "main"): 1})
    show({"API": api, "engine": engine}, with_files=True)
    printed = capsys.readouterr().out
    assert "all together      2          3      4" in printed
    assert "core/plan.py  API, engine" in printed


@pytest.mark.slow
def test_the_parts_for_a_gpu_run_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODEL_SHAPES, "small", SMALL)
    for name, value in SIZES.items():
        monkeypatch.setattr(gpu, name, value)
    for name, value in (("EVERY_S", 0.02), ("DECODES", 2), ("LONGEST_TOKENS", 250)):
        monkeypatch.setattr(steps, name, value)
    monkeypatch.setattr(gpu, "measure_limits", lambda: gpu.Limits(1e12, 1e14, 5e10))
    engine = {"memory_bytes": 2**24, "host_memory_bytes": 2**23, "max_num_batched_tokens": 64, "link_bytes_per_s": 1e6}
    for part in (gpu.steps, gpu.adapters, gpu.loads, gpu.cold):
        folder = tmp_path / part.__name__
        folder.mkdir()
        part(gpu.Rig(folder, "small", device="cpu", num_scheduler_steps=1, **engine))
    printed = capsys.readouterr().out
    assert "decode, 4 rows at 8" in printed
    assert "prefill, 2 adapters on 64 tokens" in printed
    assert "lorikeet:assist" in printed


@pytest.mark.slow
def test_what_the_host_adds_is_measured_on_a_device_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_SHAPES, "small", SMALL)
    for name, value in (("EVERY_S", 0.02), ("DECODES", 2), ("LONGEST_TOKENS", 250)):
        monkeypatch.setattr(steps, name, value)
    device = gpu.TimedDevice(0.001, 0.002, link_bytes_per_s=1e6)
    with gpu.timed_rig(device, memory_bytes=2**24, host_bytes=2**23, shape="small") as rig:
        load_s, link_s = gpu.host_load(rig, device, count=2, rank=8)
        idle, gap_s = gpu.host_idle(rig, device, requests=4)
    assert 0.001 < link_s <= load_s
    assert 0.0 < idle < 1.0
    assert gap_s > 0.0


@pytest.mark.slow
def test_a_short_run_of_dlora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlora, "WINDOW_LIMITS", 0.02)
    assert dlora.serve(2.0, dlora.MERGED, 10, 1.0, dlora.SMALL_BATCH, 1)["latency_per_token_s"] > 0
    instances = dlora.vllm("7b", dlora.SHARED_SLICE_S)
    assert dlora.run_at(instances, "7b", 1.0, 1, adapters=8)["latency_per_token_s"] > 0


def test_dlora_lengths_have_the_printed_statistics() -> None:
    asked = dlora.lengths()
    assert max(request.input_tokens + request.output_tokens for request in asked) == dlora.CONTEXT
    for mean, longest in zip(dlora.MEAN_TOKENS, dlora.LONGEST, strict=True):
        tokens = mean * dlora.of_mean(longest)
        assert (tokens.mean(), tokens.max() / mean) == pytest.approx((mean, longest))


@pytest.mark.slow
def test_a_short_run_of_loraserve(monkeypatch: pytest.MonkeyPatch) -> None:
    (points,) = loraserve.known(loraserve.PROFILE).operating_points
    assert sorted(points.tokens_per_s.values(), reverse=True) == [points.tokens_per_s[rank] for rank in PAPER_RANKS]
    for name, seconds in (("WINDOW_S", 3.0), ("WARM_S", 0.0), ("PERIOD_S", 1.0)):
        monkeypatch.setattr(loraserve, name, seconds)
    for mix in ("uniform shifting", "production 50"):
        made = loraserve.serve(loraserve.PROFILE, mix, loraserve.OURS, 8.0, 1, 1)
        assert made["ttft_p95_s"] > 0


@pytest.mark.parametrize("paper", [dlora.PAPER, loraserve.PAPER], ids=["dlora", "loraserve"])
def test_figures_tables_and_plots_take_what_their_runs_return(paper: Paper) -> None:
    def canned(run: Run) -> Any:
        return 2.0 if run.function.__name__ in ("find_rate", "find_peak_rate", "imbalance") else FIGURES

    for part in paper.measurements:
        for figure in part.figures.values():
            assert isinstance(figure.of([canned(run) for run in figure.runs]), (float, Answer))
        for table in part.tables:
            assert {len(row) for row in table.rows([canned(run) for run in table.runs])} == {len(table.headings)}
        for plot in part.plots:
            assert all(len(line.xs) == len(line.ys) for line in plot.series([canned(run) for run in plot.runs]))


def test_a_run_too_short_to_find_a_peak_says_so() -> None:
    with pytest.raises(RuntimeError, match="too short"):
        peak(lambda rate: 2.0, 1.0, 0.1)


FIGURES = {
    **{f"ttft_{name}_s": 0.5 for name in ("mean", "p50", "p95", "p99")},
    **{f"{name}_mean_s": 0.1 for name in ("tpt", "e2e", "tpot")},
    "latency_per_token_s": 0.1,
    "within": [0.9],
    "held_share": 0.5,
    **dict.fromkeys(("e2e_p90_s", "served_per_s", "tbt_s"), 0.5),
    "switch_s": 0.1,
    "drained_s": 10.0,
    "held_most": [3, 4],
    "routed_most": [2, 4],
    "routed_bytes_most": [200, 400],
    "adapter_hit_rate": 0.5,
    "kv_hit_rate": None,
    "invalid_kv_share": 0.0,
    "failed": 0,
}
