"""``lorikeet simulate``: scenarios, determinism, and errors of bad scenarios."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import write_profile
from lorikeet.simulator.scenario import Scenario, ScenarioError, make_scenario
from lorikeet.simulator.study import find_peak_rate, run_scenario
from lorikeet.simulator.trials import Trial, run_trial
from lorikeet.workloads.workload import WorkloadRequest, read_any, write_workload
from tests.support.profiles import round_profile

MADE = {"prompt_tokens": "128", "output_tokens": "64"}


def quiet(stage: str, done: int, total: int) -> None:
    """Show nothing."""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The round profile as a file."""
    file = tmp_path / "round.toml"
    write_profile(round_profile(), file)
    return str(file)


def scenario(profile: object, **changes: object) -> Scenario:
    fields = {"profile": profile, "count": 50, "rate": "5", "adapters": 4, "ranks": "1,2", "prompt_tokens": "1-20"}
    return make_scenario(None, {**fields, "output_tokens": "1-30", **changes})


def test_every_request_gets_the_tokens_it_asks_for(profile: str) -> None:
    outcome = run_scenario(scenario(profile), quiet)
    assert outcome.figures.completed == 50
    assert all(each.output_tokens == each.asked_tokens for each in outcome.simulated.run.exchanges)
    assert outcome.figures.itl_s is not None
    assert outcome.figures.itl_s.count == sum(e.output_tokens - 1 for e in outcome.simulated.run.exchanges)


def test_single_request_takes_the_profiles_times(profile: str) -> None:
    alone = scenario(profile, count=1, adapters=0, prompt_tokens="5", output_tokens="3", arrivals="now", rate=None)
    (exchange,) = run_scenario(alone, quiet).simulated.run.exchanges
    assert exchange.ttft_s == pytest.approx(0.014)
    assert exchange.e2e_s == pytest.approx(0.014 + 0.0106 + 0.0107)


def test_an_engine_that_plans_several_steps_keeps_arrivals_waiting(profile: str) -> None:
    anew = run_scenario(scenario(profile), quiet).figures
    ahead = run_scenario(scenario(profile, engine={"num_scheduler_steps": 8, "multi_step_limit_s": 1.0}), quiet).figures
    assert anew.ttft_s is not None
    assert ahead.ttft_s is not None
    assert ahead.ttft_s.mean > anew.ttft_s.mean


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_simulation_is_stopped_only_if_more_requests_miss_than_may(profile: str, replicas: int) -> None:
    asked = scenario(profile, count=200, rate=str(8 * replicas), slo="ttft=0.3", replicas=replicas)
    whole = run_trial(Trial(asked))
    assert whole.attainment is not None
    missed = 200 - round(200 * whole.attainment)
    assert 1 < missed < 200
    assert run_trial(Trial(asked, most_missed=missed)) == whole
    stopped = run_trial(Trial(asked, most_missed=1))
    assert 1 < stopped.stopped_after < 200
    assert whole.meets(whole.attainment)
    assert not stopped.meets(0.0)


@pytest.mark.parametrize("predictor", ["none", "history", "oracle:0.8"])
def test_length_predictor_follows_the_scenario(profile: str, predictor: str) -> None:
    assert run_scenario(scenario(profile, predictor=predictor), quiet).figures.completed == 50


def test_unknown_predictor_is_refused(profile: str) -> None:
    with pytest.raises(ValueError, match="predictor 'psychic'"):
        run_scenario(scenario(profile, predictor="psychic"), quiet)


@pytest.mark.slow
def test_of_many_replicas_least_median_and_most_are_shown(profile: str) -> None:
    flags = ["simulate", "--profile", profile, "--replicas", "33", "--count", "40", "--top", "0"]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "33 replicas" in result.output
    assert [name in result.output for name in ("least", "median", "most", "replica-0")] == [True, True, True, False]


@pytest.mark.slow
def test_simulate_writes_the_same_bytes_per_seed(profile: str, tmp_path: Path) -> None:
    flags = ["simulate", "--profile", profile, "--count", "40", "--adapters", "3", "--rate", "20", "--ranks", "1,2"]
    written = []
    for number, seed in enumerate(("1", "1", "2")):
        report = tmp_path / f"{number}.json"
        plot = tmp_path / "plot.svg"
        result = CliRunner().invoke(app, [*flags, "--seed", seed, "--json", str(report), "--plot", str(plot)])
        assert result.exit_code == 0, result.output
        assert "modelled" in result.output
        assert plot.read_text().startswith("<svg")
        written.append(report.read_bytes())
    assert written[0] == written[1] != written[2]
    assert json.loads(written[0])["figures"]["completed"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["lorikeet:plain", "loraserve:random", "toppings:first-fit"])
def test_report_of_several_replicas_is_deterministic(preset: str, profile: str, tmp_path: Path) -> None:
    flags = ["simulate", "--profile", profile, "--preset", f"{preset},kernel_form=unpadded", "--replicas", "3"]
    flags += ["--count", "60", "--adapters", "6", "--rate", "30", "--ranks", "1,2", "--fetch", "store-and-forward"]
    written = []
    for number in range(2):
        report = tmp_path / f"{number}.json"
        result = CliRunner().invoke(app, [*flags, "--json", str(report)])
        assert result.exit_code == 0, result.output
        assert "replica-2" in result.output
        written.append(report.read_bytes())
    assert written[0] == written[1]
    told = json.loads(written[0])
    assert told["figures"]["completed"] == 60
    assert sum(each["requests"] for each in told["cluster"]["replicas"]) == 60
    assert told["engine"]["total_blocks"] == 3 * 400


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_simulations_of_two_processes_are_equal(replicas: str, profile: str, tmp_path: Path) -> None:
    flags = ["--profile", profile, "--replicas", replicas, "--count", "200", "--adapters", "40", "--rate", "60"]
    flags += ["--ranks", "1,2,4", "--prompt-tokens", "20-300", "--predictor", "history"]
    written = []
    for number, allocator in enumerate(("pymalloc", "malloc")):  # so that neither hashes nor addresses are the same
        report = tmp_path / f"{number}.json"
        source = f"objects = [object() for _ in range({9_973 * number})]; from lorikeet.cli.app import app; app()"
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONMALLOC": allocator}
        command = [sys.executable, "-c", source, "simulate", *flags, "--json", str(report)]
        subprocess.run(command, env=environment, capture_output=True, check=True)
        written.append(report.read_bytes())
    assert written[0] == written[1]
    assert json.loads(written[0])["figures"]["completed"] == 200


def test_report_of_one_replica_has_no_cluster_part(profile: str) -> None:
    report = run_scenario(scenario(profile), quiet).report()
    assert "cluster" not in report
    assert report["engine"]["total_blocks"] == 400


def test_scenario_may_start_with_adapters_in_their_files(profile: str) -> None:
    found = run_scenario(scenario(profile, replicas=2, provisioned=False), quiet).simulated.cluster
    assert found is not None
    assert found.provisions == 4, "each once, from its files; the other replica fetches it"
    assert run_scenario(scenario(profile, replicas=2), quiet).simulated.cluster.provisions == 0


@pytest.mark.slow
def test_the_peak_of_two_replicas_is_higher(profile: str) -> None:
    limits = {"slo": "ttft=0.3", "count": 100}
    (one, _), (two, _) = (
        find_peak_rate(scenario(profile, replicas=replicas, **limits), quiet, target=0.9, start=1.0)
        for replicas in (1, 2)
    )
    assert one.rate is not None
    assert two.rate is not None
    assert two.rate > 1.5 * one.rate


def test_flags_win_over_the_file(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(f'profile = "{profile}"\ncount = 3\nseed = 4\nengine = {{ max_num_seqs = 2, block_size = 8 }}\n')
    merged = make_scenario(file, {"count": 5, "rate": None, "engine": {"max_num_seqs": "9"}})
    assert (merged.count, merged.seed) == (5, 4)
    assert (merged.settings().engine.max_num_seqs, merged.settings().engine.block_size) == (9, 8)


def test_a_chat_finds_its_earlier_turns_in_the_cache(profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    turns = [
        {"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 5000, "input_length": 128, "output_length": 4, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 6000, "input_length": 64, "output_length": 4, "hash_ids": [8, 9]},
    ]
    trace.write_text("\n".join(map(json.dumps, turns)))
    given = {"trace": str(trace), "shape": "chat", "block_size": 32, "adapters": 1, "ranks": "1"}
    chat = make_scenario(None, {"profile": profile, **given})
    cached = [each.cached_tokens for each in run_scenario(chat, quiet).simulated.run.exchanges]
    assert cached == [0, 64, 0]


@pytest.mark.slow
def test_the_peak_is_where_the_limits_begin_to_be_missed(profile: str) -> None:
    peak, outcomes = find_peak_rate(scenario(profile, slo="ttft=0.3", count=200), quiet, target=0.9, start=1.0)
    assert peak.rate is not None
    assert peak.missed_rate is not None
    assert peak.missed_rate <= peak.rate * 1.05
    assert len(outcomes) == len(peak.probes)


@pytest.mark.long
@pytest.mark.slow
def test_a_peak_under_a_loose_limit_is_a_load_that_lasts(profile: str) -> None:
    """A few requests at once are all answered within a limit that is long beside the probe."""
    ask = partial(scenario, profile, slo="ttft=5", adapters=0, prompt_tokens="16", output_tokens="16")
    peak, outcomes = find_peak_rate(ask(count=50), quiet, target=0.9, start=1.0)
    assert peak.rate is not None
    assert peak.missed_rate is not None
    assert max(len(each.simulated.run.exchanges) for each in outcomes) > 50
    lasting = run_scenario(ask(count=20 * round(5 * peak.rate)), quiet, peak.rate / 1.2)
    attained = lasting.figures.slo_attainment
    assert attained is not None
    assert attained > 0.9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"profile": "nowhere"}, "unknown profile 'nowhere'"),
        ({"preset": "vllm"}, "unknown preset 'vllm'"),
        ({"engine": {"max_runing": 3}}, "max_runing"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"replicas": 0}, "$.replicas"),
        ({"fetch": "by post"}, "$.fetch"),
        ({"ranks": "8;16"}, "8;16"),
        ({"rate": "fast"}, "fast"),
        ({"slo": "ttft"}, "'ttft' is not a limit"),
        ({"trace": "/nowhere.jsonl", **MADE}, "nowhere.jsonl"),
        ({"trace": "/nowhere.jsonl"}, "prompt_tokens: has no effect on a trace"),
        ({"trace": "/nowhere.jsonl", **MADE, "arrivals": "uniform"}, "arrivals: has no effect on a trace"),
        ({"length_scale": 2.0}, "length_scale: needs a trace"),
        ({"cv": 2.0}, "cv: has no effect on poisson arrivals"),
        ({"fetch": "store-and-forward"}, "fetch: has no effect with one replica"),
        ({"provisioned": False}, "provisioned: has no effect with one replica"),
        ({"count": None, "duration_s": float("inf")}, "duration_s inf is not a positive number"),
        ({"shape": "agent"}, "prompt_tokens: has no effect on the shape agent"),
        ({"arrivals": "now"}, "arrivals 'now' have no rate"),
        ({"output_tokens": "0-5"}, "output_tokens must be at least 1"),
        ({"count": -5}, "$.count"),
        ({"adapters": -1}, "$.adapters"),
        ({"modules": "q,w"}, "'q,w': choose from q, k, v"),
        ({"engine": {"preset": "elora"}}, "engine.preset: set the preset of the scenario instead"),
        ({"engine": {"objective": "fast"}}, "engine: 'fast' must be one of mixed, "),
        ({"engine": {"device": "cuda"}}, "engine.device: has no effect in a simulation"),
        ({"shape": "chat"}, "needs a trace"),
        ({"max_model_len": 100_000}, "is too small for a sequence of 100000 tokens"),
    ],
)
def test_error_names_the_invalid_setting(profile: str, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        run_scenario(scenario(**{"profile": profile, **changes}), quiet)


@pytest.mark.parametrize(
    ("changes", "start", "complaint"),
    [
        ({"rate": None, "arrivals": "now"}, 1.0, "a peak is a single rate"),
        ({"rate": "0:2,400:8"}, 1.0, "a peak is a single rate"),
        ({"rate": "-1"}, -1.0, "a search must begin at a positive rate"),
        ({"count": None, "duration_s": 2.0}, 4.0, "at 4 requests/s fewer than 10 arrive"),
    ],
)
def test_meaningless_peak_search_is_refused(
    profile: str, changes: dict[str, object], start: float, complaint: str
) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        find_peak_rate(scenario(profile, slo="ttft=0.3", **changes), quiet, target=0.9, start=start)


def test_a_trace_may_have_adapters_of_its_own(profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    named = ("formal", None, "legal", "adapter-0001")
    write_workload(trace, [WorkloadRequest(0.1 * at, name, 8, 4) for at, name in enumerate(named)])
    figures = run_scenario(make_scenario(None, {"profile": profile, "trace": str(trace)}), quiet).figures
    assert {each.adapter for each in figures.adapters} == set(named)
    among = make_scenario(None, {"profile": profile, "trace": str(trace), "adapters": 2, "ranks": "1,2"})
    refs = among.adapter_refs(load_profile(profile).geometry, read_any(trace))
    assert {name: ref.max_rank for name, ref in refs.items()} == {
        **{"adapter-0000": 1, "adapter-0001": 2},
        **{"formal": 1, "legal": 2},
    }


def test_a_search_in_a_fixed_time_tries_no_rate_at_which_next_to_nothing_comes(profile: str) -> None:
    never = scenario(profile, count=None, duration_s=10.0, slo="ttft=0.000001")
    peak, outcomes = find_peak_rate(never, quiet, target=0.9, start=3.0)
    assert peak.rate is None
    assert [outcome.rate for outcome in outcomes] == [3.0, 1.5]


def test_numbers_of_a_file_may_be_numbers(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(f"profile = {profile!r}\nrate = 4\nprompt_tokens = 20\nranks = 8\nreplicas = 2\n")
    read = make_scenario(file, {})
    assert (read.rate, read.prompt_tokens, read.ranks, read.replicas) == ("4", "20", "8", 2)


def test_prefix_blocks_have_the_traces_length_and_scale_with_it(profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        WorkloadRequest(0.0, None, 1024, 4, (1, 2)),
        WorkloadRequest(5.0, None, 1024, 4, (1, 3)),
    ]
    found = {}
    for said in (0, 256):
        write_workload(trace, [msgspec.structs.replace(each, prefix_block_tokens=said) for each in lines])
        half = make_scenario(None, {"profile": profile, "trace": str(trace), "length_scale": 0.5})
        simulated = run_scenario(half, quiet).simulated
        found[said] = [each.cached_tokens for each in simulated.run.exchanges], simulated.notes[-1]
    assert found[0] == ([0, 256], "prefix blocks of 256 tokens"), "they do not say: 512 before scaling"
    assert found[256] == ([0, 128], "prefix blocks of 128 tokens")


def test_adapters_of_any_modules_are_assisted() -> None:
    given = {
        **{"profile": "a100-80-llama-2-7b", "preset": "toppings", "count": 60, "rate": "2"},
        **{"adapters": 40, "ranks": "64"},
        "engine": {"host_memory_bytes": 40 * 2**30},
    }
    found = [
        run_scenario(make_scenario(None, {**given, "preset": each}), quiet)
        for each in ("toppings", "toppings,cold_start=wait")
    ]
    assisted, waiting = (each.figures.ttft_s for each in found)
    assert assisted is not None
    assert waiting is not None
    assert assisted.p50 < waiting.p50


@pytest.mark.slow
def test_plot_of_a_search_shows_its_peak(profile: str, tmp_path: Path) -> None:
    flags = ["simulate", "--profile", profile, "--count", "200", "--adapters", "4", "--ranks", "1,2"]
    flags += ["--prompt-tokens", "1-20", "--output-tokens", "1-30", "--slo", "ttft=1.1", "--find-peak"]
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    result = CliRunner().invoke(app, [*flags, "--json", str(report), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_bytes())
    assert found["probes"][-1]["rate"] == found["missed_rate"], "the last probe is not the one to show"
    assert f"at {found['peak_rate']:.4g} requests/s" in plot.read_text()
    at_peak = tmp_path / "at_peak.svg"
    once = [*flags[:-1], "--rate", repr(found["peak_rate"]), "--plot", str(at_peak)]
    assert CliRunner().invoke(app, once).exit_code == 0
    assert polylines(plot) == polylines(at_peak)


def polylines(plot: Path) -> list[str]:
    return re.findall("<polyline[^>]*>", plot.read_text())


@pytest.mark.long
@pytest.mark.slow
def test_presets_and_seeds_are_compared_and_the_best_is_marked(profile: str, tmp_path: Path) -> None:
    flags = ["simulate", "--profile", profile, "--count", "200", "--adapters", "4", "--ranks", "1,2", "--rate", "20"]
    flags += ["--slo", "ttft=1,tpot=0.5", "--preset", "lorikeet:plain", "--preset", "elora", "--seeds", "2"]
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    flags += ["--json", str(report), "--plot", str(plot)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, flags)
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_bytes())
    assert {name: [each["seed"] for each in of] for name, of in found["presets"].items()} == {
        "lorikeet:plain": [0, 1],
        "elora": [0, 1],
    }
    in_time = {name: sum(each["attainment"] for each in of) for name, of in found["presets"].items()}
    late_s = {name: sum(each["ttft_p99_s"] for each in of) for name, of in found["presets"].items()}
    assert found["best"] == max(in_time, key=lambda name: (in_time[name], -late_s[name]))
    lines = [line for line in result.output.splitlines() if "best" in line]
    assert found["best"] in lines[0]
    assert not any(name in line for name in found["presets"] for line in lines[1:]), "the rest says how"
    assert "elora" in plot.read_text()
    wrong = CliRunner().invoke(app, [*flags, "--preset", "elroa"])
    assert (wrong.exit_code, "elora" in wrong.output) == (2, True)


def test_the_plot_has_p99_and_the_limit(profile: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    flags = ["simulate", "--profile", profile, "--count", "20", "--slo", "ttft=1.5", "--plot", str(plot)]
    assert CliRunner().invoke(app, flags).exit_code == 0
    drawn = plot.read_text()
    assert "99%" in drawn
    assert "limit 1.5 s" in drawn
    assert drawn.count("stroke-dasharray") == 1, "only TTFT has a limit"


def test_report_counts_turns_that_waited_for_an_answer(profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    talk = [WorkloadRequest(0.0, None, 64, 40, (1, 2), "talk"), WorkloadRequest(0.01, None, 160, 4, (1, 2, 3), "talk")]
    write_workload(trace, talk)
    flags = ["simulate", "--profile", profile, "--trace", str(trace), "--block-size", "32"]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "held for the answer before" in result.output
    assert "--concurrency" not in result.output


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('profile = "x"\nadaptors = 3\n')
    with pytest.raises(ScenarioError, match="adaptors"):
        make_scenario(file, {})
    with pytest.raises(ScenarioError, match="give --profile NAME"):
        make_scenario(None, {})


def test_the_command_ends_with_code_2_and_the_reason(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "--profile", "nowhere"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["simulate", "--profile", "x", "--json", str(tmp_path / "no" / "file.json")])
    assert result.exit_code == 2
