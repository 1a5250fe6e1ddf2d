"""ELORA's settings: presets of the memory on conversations of many adapters, and its largest model, modelled.

Shi and others, "ELORA: Efficient LoRA and KV Cache Management for Multi-LoRA LLM Serving". Numbers beside ours are
those of the text: means over three models, 20, 50 and 100 adapters and ten rates, which stand there for their order.

The conversations are Mooncake's (Apache-2.0), prompts divided by 32 and answers by 8, each next turn with the answers
as generated, on the default model by a quick profile of this machine, with a declared link of 0.8 GB/s: a device pool
of a quarter of the working set, a host pool for all of it. ``--live`` runs elora and its rivals on this machine, too,
in turns. The largest model is Llama-2-70B on eight H100 for the paper's Llama3-70B on eight H800.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import LORIKEET, THREADS, default_model, in_turns, print_table
from benchmarks.papers.runs import MOONCAKE, Engine, Figures, Options, Runs, main, ms, peak, run_engine, trace
from lorikeet.bench.arrivals import Rates
from lorikeet.bench.conversations import scaled_block_tokens
from lorikeet.bench.memory_bench import MemorySetting, live_rig, modelled_rig, preset_figures, run_preset
from lorikeet.bench.memory_work import MemoryWork, WorkOptions, working_set
from lorikeet.bench.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.bench.statistics import mean_of, ratio_over_requests
from lorikeet.bench.synthetic import adapter_names, spread
from lorikeet.bench.workload import MOONCAKE_BLOCK_TOKENS
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile, decode_profile
from lorikeet.presets import PRESETS

OURS, S_LORA, STATIC, DISCARDING = "elora", "elora:s-lora", "vllm-static", "vllm-static:discard"
RIVALS = (S_LORA, DISCARDING, STATIC)
ADAPTERS, RANKS, CHOICE = 100, (32, 64), "zipf:1.5"
LEAST_TURNS, MOST_TOKENS, STEP_TOKENS, SCALE, ANSWER_SCALE = 3, 500, 256, 1 / 32, 1 / 8
LINK_BYTES_PER_S, LOAD = 0.8e9, 0.8
SLO_TIMES, UNLOADED_RATE, LIVE_REPEATS = 5, 0.05, 3
"""Limit of the mean TTFT over what ours has when every request is alone."""
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
"""Of the device for adapters, among which the paper's oracle finds the best static split (VIII-J)."""
PRINTED = {
    "elora:wom": (1.51, 1.34),
    "elora:wos": (1.42, 1.29),
    "elora:wol": (1.21, 1.11),
    "elora:woc": (1.19, 1.09),
    "elora:wov": (1.25, 1.15),
    "elora:wou": (1.21, 1.14),
    "elora:bfs": (2.29, 1.54),
    "elora:rrip": (1.35, 1.27),
    "elora:hawkeye": (1.38, 1.31),
    "elora:halp": (1.41, 1.31),
}
"""TTFT and TPOT over ELORA's (VIII-E to VIII-H). The best static split has 1.39 and 1.24 (VIII-J)."""

LARGE_PROFILE, LARGE_ADAPTERS, LARGE_PRESETS, LARGE_SLO_S = (
    "h100x8-llama-2-70b",
    (20, 50, 100),
    (OURS, STATIC, S_LORA),
    0.5,
)
LARGE_BLOCK_TOKENS = 32


class Scenario(NamedTuple):
    """A service of the paper: shape of requests, arrivals, choice of adapters, rate from which its peak is searched."""

    shape: str
    arrivals: str
    choice: str
    first_rate: float


SCENARIOS = {
    "chatbot": Scenario("chatbot", "poisson", "zipf:1", 24.0),
    "translation": Scenario("translation", FUNCTION_ARRIVALS, "uniform", 96.0),
    "agent": Scenario("agent", FUNCTION_ARRIVALS, "uniform", 128.0),
}
REDUCTIONS = {
    STATIC: ({"chatbot": 0.438, "translation": 0.494, "agent": 0.438}, 0.378, 0.789),
    S_LORA: ({"chatbot": 0.384, "translation": 0.384, "agent": 0.532}, 0.314, 0.499),
}
"""TTFT less by scenario, TPOT less and peak higher over all (VIII-B). Two scenarios are printed as their mean."""


def run(runs: Runs, options: Options) -> None:
    """Run all and print the tables."""
    requests = 120 if options.quick else 300
    profile = runs.all({"machine": (measure_profile,)})["machine"]
    slo_s = SLO_TIMES * run_conversations(profile, OURS, UNLOADED_RATE, requests)["ttft_mean_s"]
    searched = (OURS, *RIVALS)
    peaks = runs.all({f"peak-{preset}": (find, profile, preset, slo_s, requests) for preset in searched})
    rows = [[preset, f"{peaks[f'peak-{preset}']:.2f}"] for preset in searched]
    rows = [[*row, f"{peaks[f'peak-{OURS}'] / float(row[1]):.2f}"] for row in rows]
    print_table(f"Highest rate with a mean TTFT below {ms(slo_s)} ms", ["preset", "requests/s", "elora's is x"], rows)
    low, high = (LOAD * peaks[f"peak-{preset}"] for preset in (S_LORA, OURS))
    presets = (
        [OURS, *RIVALS, *PRINTED] if options.quick else [each for each in PRESETS if not each.startswith("lorikeet:")]
    )
    all_presets(runs, profile, presets, (low, high), requests)
    splits(runs, profile, low, requests)
    if options.flags.live:
        live({rival: LOAD * peaks[f"peak-{rival}"] for rival in RIVALS}, profile, requests)
    large(runs, options)


def all_presets(runs: Runs, profile: str, presets: Sequence[str], rates: tuple[float, float], requests: int) -> None:
    """Print every preset that is a system on the conversations, at two rates."""
    cases = product(presets, rates)
    found = runs.all({f"{each}-{rate:.3f}": (run_conversations, profile, each, rate, requests) for each, rate in cases})
    low, high = rates
    rows = []
    for preset in presets:
        own, ours, loaded, ours_loaded = (found[f"{each}-{rate:.3f}"] for rate in rates for each in (preset, OURS))
        ratios = [own[key] / ours[key] for key in ("ttft_mean_s", "tpot_mean_s")]
        paper = PRINTED.get(preset, ("", ""))
        hits = [f"{own[key]:.0%}" if own[key] is not None else "" for key in ("adapter_hit_rate", "kv_hit_rate")]
        row = [preset, ms(own["ttft_mean_s"]), f"{ratios[0]:.2f}", paper[0]]
        row += [f"{loaded['ttft_mean_s'] / ours_loaded['ttft_mean_s']:.2f}"]
        row += [ms(own["tpot_mean_s"]), f"{ratios[1]:.2f}", paper[1], *hits, f"{own['invalid_kv_share']:.0%}"]
        rows.append(row)
    headings = ["preset", "TTFT, ms", "x elora's", "paper", f"at {high:.2f}/s", "TPOT, ms", "x elora's", "paper"]
    headings += ["adapter hits", "KV hits", "invalid KV"]
    print_table(f"All on one workload, at {low:.2f} requests/s", headings, rows)


def splits(runs: Runs, profile: str, rate: float, requests: int) -> None:
    """Print static splits of the device."""
    found = runs.all(
        {
            f"split-{share:g}": (run_split, profile, f"{STATIC},adapter_share={share:g}", rate, requests)
            for share in SHARES
        }
    )
    ours = run_conversations(profile, OURS, rate, requests)["ttft_mean_s"]
    rows = [
        [f"{share:g}", ms(each["ttft_mean_s"]), f"{each['ttft_mean_s'] / ours:.2f}", each["failed"]]
        for share in SHARES
        for each in [found[f"split-{share:g}"]]
    ]
    print_table("Static splits (paper's best: 1.39)", ["share", "TTFT, ms", "x elora's", "failed"], rows)


def large(runs: Runs, options: Options) -> None:
    """Print the paper's three services on its largest model."""
    names = [("chatbot", 100)] if options.quick else list(product(SCENARIOS, LARGE_ADAPTERS))
    duration_s = 60.0 if options.quick else 240.0
    found = runs.all({f"large-{name}-{count}": (run_large, name, count, duration_s) for name, count in names})
    rows = []
    for (name, count), (rival, printed) in product(names, REDUCTIONS.items()):
        case = found[f"large-{name}-{count}"]
        row = [name, count, rival]
        for key, paper in (("ttft_mean_s", printed[0][name]), ("tpot_mean_s", printed[1])):
            shares = [
                1 - ours[key] / theirs[key]
                for ours, theirs in zip(*(case["loads"][e] for e in (OURS, rival)), strict=True)
            ]
            row += [f"{sum(shares) / len(shares):.0%}", f"{paper:.0%}"]
        own, other = case["peaks"][OURS], case["peaks"][rival]
        rows.append([*row, f"{own:.1f}", f"{other:.1f}", f"{own / other - 1:.0%}", f"{printed[2]:.0%}"])
    headings = ["service", "adapters", "rival", "TTFT less", "paper", "TPOT less", "paper"]
    headings += ["peak, /s", "rival's", "higher by", "paper"]
    print_table(f"{LARGE_PROFILE}, means over half of elora's peak and all of it", headings, rows)


# --- conversations -----------------------------------------------------------------------------------


def measure_profile() -> str:
    """Return a quick profile of this machine as TOML."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-profile-") as scratch:
        file = Path(scratch) / "profile.toml"
        command = [LORIKEET, "profile", "--quick", "--output", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return file.read_text(encoding="utf-8")


@cache
def profile_of(text: str) -> CostProfile:
    """Return a profile from its TOML."""
    return decode_profile(text, "this machine")


def conversations(rate: float, requests: int) -> MemoryWork:
    """Return the same conversations at any rate, closer together or further apart; at least so many requests."""
    names = tuple(adapter_names(ADAPTERS))
    recipe = Recipe(
        trace=trace(MOONCAKE),
        shape="chat",
        rates=Rates.constant(rate),
        count=requests,
        adapters=names,
        ranks=tuple(spread(RANKS, ADAPTERS)),
        adapter_choice=CHOICE,
        length_scale=SCALE,
        answer_scale=ANSWER_SCALE,
        most_tokens=MOST_TOKENS,
        least_turns=LEAST_TURNS,
        seed=7,
    )
    return MemoryWork(recipe.requests(), names, scaled_block_tokens(MOONCAKE_BLOCK_TOKENS, SCALE), recipe.seed)


def setting_of(profile: CostProfile, requests: int) -> MemorySetting:
    """Return a device pool of a quarter of the working set, and a host pool for all of it and all adapters."""
    work = conversations(1.0, requests)
    rig = modelled_rig(profile, work, WorkOptions(source="", ranks=RANKS))
    filled = working_set(work, rig.adapters, rig.geometry, 16)
    return MemorySetting(
        model=str(default_model()),
        dtype="bfloat16",
        threads=THREADS,
        touch_memory=True,
        memory_bytes=filled.total_bytes // 4,
        host_memory_bytes=filled.host_bytes,
        link_bytes_per_s=LINK_BYTES_PER_S,
        max_model_len=MOST_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
    )


def run_conversations(profile: str, preset: str, rate: float, requests: int) -> Figures:
    """Return a preset's figures; all requests must have been answered.

    Raises:
        RuntimeError: one failed.
    """
    made = run_split(profile, preset, rate, requests)
    if made["failed"]:
        raise RuntimeError(f"{preset}: {made['failed']} requests failed: {made['errors']}")
    return made


def run_split(profile: str, preset: str, rate: float, requests: int) -> Figures:
    """Return a preset's figures, with the number of requests that failed: a split may have no room for some."""
    work = conversations(rate, requests)
    rig = modelled_rig(profile_of(profile), work, WorkOptions(source="", ranks=RANKS))
    made = preset_figures(preset, run_preset(rig, setting_of(profile_of(profile), requests).settings(preset), work))
    return made | {"failed": made["requests"] - made["completed"]}


def find(profile: str, preset: str, slo_s: float, requests: int) -> float:
    """Return the highest rate at which the mean TTFT stays below a limit: ELORA's peak load (VIII-A)."""
    return peak(lambda rate: slo_s / run_conversations(profile, preset, rate, requests)["ttft_mean_s"], 1.0, 0.02)


def live(rates: dict[str, float], profile: str, requests: int) -> None:
    """Run elora and each rival on this machine in turns, at the rival's rate, and print ratios beside the model's."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="lorikeet-live-") as scratch:
        options = WorkOptions(source="", ranks=RANKS)
        rig = live_rig(default_model(), "bfloat16", conversations(1.0, requests), options, Path(scratch))
        setting = setting_of(profile_of(profile), requests)
        for rival, rate in rates.items():
            work = conversations(rate, requests)

            def side(preset: str, work: MemoryWork = work) -> Any:
                return lambda turn: [
                    each.ttft_s for each in run_preset(rig, setting.settings(preset), work).run.exchanges
                ]

            found = in_turns({preset: side(preset) for preset in (OURS, rival)}, LIVE_REPEATS, warm_up=0)
            ratio = ratio_over_requests(found[OURS], found[rival], mean_of)
            modelled = [run_conversations(profile, each, rate, requests)["ttft_mean_s"] for each in (OURS, rival)]
            words = f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            rows.append([rival, f"{rate:.2f}", words, f"{modelled[0] / modelled[1]:.3f}"])
    print_table("Mean TTFT of elora over the rival's, live", ["rival", "requests/s", "live", "modelled"], rows)


# --- the largest model -------------------------------------------------------------------------------


def run_large(scenario: str, adapters: int, duration_s: float) -> dict[str, Any]:
    """Return the peak of every preset, and all presets' figures at half of elora's and at it."""
    figures = cache(lambda preset, rate: _run_large(scenario, adapters, duration_s, preset, rate))

    def search(preset: str, first_rate: float) -> float:
        return peak(lambda rate: LARGE_SLO_S / figures(preset, rate)["ttft_mean_s"], first_rate, 0.1)

    full = search(OURS, SCENARIOS[scenario].first_rate)
    peaks = {preset: full if preset == OURS else search(preset, full) for preset in LARGE_PRESETS}
    keys = ("ttft_mean_s", "tpot_mean_s")
    loads = {
        preset: [{key: figures(preset, rate)[key] for key in keys} for rate in (full / 2, full)]
        for preset in LARGE_PRESETS
    }
    return {"peaks": peaks, "loads": loads}


def _run_large(scenario: str, adapters: int, duration_s: float, preset: str, rate: float) -> Figures:
    about, profile = SCENARIOS[scenario], load_profile(LARGE_PROFILE)
    names = tuple(adapter_names(adapters))
    recipe = Recipe(
        shape=about.shape,
        arrivals=about.arrivals,
        variation=2.0,
        rates=Rates.constant(rate),
        duration_s=duration_s,
        adapters=names,
        ranks=tuple(spread(RANKS, adapters)),
        adapter_choice=about.choice,
        block_size=LARGE_BLOCK_TOKENS,
        seed=11,
    )
    fits = [each for each in recipe.requests() if each.input_tokens + each.output_tokens <= profile.max_model_len]
    engine = Engine(
        profile=profile,
        adapters=adapters,
        ranks=RANKS,
        modules=LORA_MODULES,
        host_bytes=256 * 10**9,
        block_size=LARGE_BLOCK_TOKENS,
        max_num_seqs=512,
    )
    return run_engine(preset, engine, MemoryWork(fits, names, LARGE_BLOCK_TOKENS, 11))


if __name__ == "__main__":
    main(__doc__ or "", "elora", run, live="run elora and its rivals on this machine, too")
