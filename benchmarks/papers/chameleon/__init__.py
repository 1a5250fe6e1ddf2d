"""Chameleon's figures in its modelled setting, under conditions in which S-LoRA's figures match the printed ones."""

from collections.abc import Sequence
from typing import Any

from benchmarks.papers.chameleon.grid import (
    BASELINES,
    CHAMELEONS,
    CHOICE,
    GRID,
    LOADS,
    choose,
    distance,
)
from benchmarks.papers.chameleon.judged import (
    LARGE,
    LONG,
    knee_runs,
    large_knee_runs,
    large_load_runs,
    load_runs,
)
from benchmarks.papers.chameleon.simulate import CHAMELEON, S_LORA
from benchmarks.papers.measure import (
    Answer,
    Figure,
    Measurement,
    Paper,
    Plot,
    Run,
    Series,
    Table,
    compared,
    mean_of,
    over_seeds,
    reduction,
    times,
)

NO_CACHE, NO_SCHEDULER = "chameleon:no-cache", "chameleon:no-scheduler"
SYSTEMS = (S_LORA, NO_CACHE, NO_SCHEDULER, CHAMELEON)
CACHES = ("chameleon:lru", "chameleon:fairshare", NO_SCHEDULER, "chameleon:prefetch")
OTHERS = (
    *SYSTEMS,
    "chameleon:sjf",
    "chameleon:sjf-aging",
    "chameleon:lru-full",
    "chameleon:fairshare-full",
    "chameleon,admission=size-aware",
    "chameleon:s-lora-code",
)
FIRST = (1,)
"""Seed of the tables that show more than the claims."""

A40 = {
    "model and device": "Llama-2-7B on an A40 48 GB, LoRA costs of the paper's own Fig. 2 (`a40-llama-2-7b@chameleon`)",
    "adapters": "100: ranks 8, 16, 32, 64, 128, 20 each; rank by 1/i for the i-th smallest, uniform within a rank",
    "lengths": "Azure's conversation trace, cut at 4,096 tokens (8 % of requests), times the chosen factor",
    "link and step": "those of the chosen cell",
    "arrivals": "Poisson",
    "predictor": "right with probability 0.8, else the length of an answer from another quintile",
    "window": "5 × the longest answer at the printed limit on TBT of 150 ms, 225 s for a factor of 0.3",
}
FIVE = {"seeds": "five, paired; 95 % intervals"}
FEW = {"seeds": "three, paired; 95 % intervals"}
TWO = {"seeds": "two, paired; 95 % intervals"}


def _less(preset: str, load: str, percentile: str, base: str = S_LORA, windows: int = 1) -> Figure:
    """Return the figure for the reduction of TTFT against a baseline at a load."""
    own, theirs = (load_runs(each, load, windows) for each in (preset, base))
    return compared(reduction, own, theirs, f"ttft_{percentile}_s")


def _ratio(preset: str) -> Figure:
    """Return the figure for a system's knee divided by S-LoRA's."""
    return compared(times, knee_runs(preset), knee_runs(S_LORA), float)


def _largest_tbt_ms(made: Sequence[Any]) -> float:
    return max(float(each["tbt_p99_ms"]) for each in made)


def _of_chosen(name: str) -> Figure:
    return Figure((BASELINES[CHOICE.place],), lambda made: float(made[0][name]))


def _large_ratio(model: str) -> Figure:
    return mean_of(large_knee_runs(model), lambda each: times(each[CHAMELEON], each[S_LORA]))


def _large_tokens(model: str, preset: str) -> Figure:
    return mean_of(large_knee_runs(model), lambda each: each[preset] * each["tokens"])


def _large_reduction(model: str) -> Figure:
    def of(made: Sequence[Any]) -> Answer:
        count = len(LOADS)
        by_seed = [made[place : place + count] for place in range(0, len(made), count)]
        return over_seeds([sum(each["reduction"] for each in runs) / count for runs in by_seed])

    return Figure(large_load_runs(model), of)


# --- tables and plots --------------------------------------------------------------------------------


def _grid_rows(made: Sequence[Any]) -> list[list[str]]:
    baselines, others = made[: len(GRID)], made[len(GRID) :]
    chosen, rows = choose(*baselines), []
    if chosen[:2] != CHOICE[:2]:
        raise ValueError(f"the baselines choose {chosen}, and {CHOICE} was judged")
    for place, (setting, base, own) in enumerate(zip(GRID, baselines, others, strict=True)):
        reading = min(base["knees"], key=lambda each: distance(base, each))
        mark = "**chosen** " if place == chosen.place else ""
        row = [
            f"{mark}{setting.lengths:g}, {setting.link_gb_per_s:g} GB/s, {setting.step_tokens}",
            f"{base['load_percent']:.1f}, {base['adapter_percent']:.1f}",
            " / ".join(f"{knee:.1f}" for knee in base["knees"].values()),
            f"{distance(base, reading):.2f} ({reading})",
            " / ".join(f"{knee:.1f}" for knee in own["knees"].values()),
        ]
        for percentile in ("ttft_p50_s", "ttft_p99_s"):
            cells = (reduction(own["loads"][load][percentile], base["loads"][load][percentile]) for load in LOADS)
            row.append(" / ".join(f"{each:.0f}" for each in cells))
        rows.append(row)
    return rows


GRID_TABLE = Table(
    "All cells, seed 1, one window. Knees in requests/s by the limit on P99 TTFT: 5 × mean TTFT / P99 TTFT / execution "
    "time at low load. Less TTFT than S-LoRA in percent at 6 / 8 / 9 requests/s",
    (
        "lengths, link, step tokens",
        "loading, loading and computing, % of TTFT",
        "S-LoRA's knees",
        "distance (nearest reading)",
        "Chameleon's knee by that reading",
        "less P50",
        "less P99",
    ),
    (*BASELINES, *CHAMELEONS),
    _grid_rows,
)


def _load_table(title: str, cases: Sequence[tuple[str, str, int]]) -> Table:
    """Return a table of systems at loads; each case names a number of windows."""

    def rows(made: Sequence[Any]) -> list[list[str]]:
        return [
            [
                preset,
                f"{LOADS[load]:g}/s, {windows}",
                f"{each['ttft_p50_s']:.2f}",
                f"{each['ttft_p99_s']:.2f}",
                f"{each['ttft_most_s']:.1f}",
                f"{each['tbt_p99_ms']:.0f}",
                f"{each['hit_share']:.0%}",
                f"{each['loaded_bytes'] / 1e9:.0f}",
                f"{each['bypassed_share']:.2%}, {each['squashed_share']:.2%}",
                f"{each['completed_share']:.0%}",
            ]
            for (preset, load, windows), each in zip(cases, made, strict=True)
        ]

    headings = (
        "preset",
        "load, windows",
        "P50 TTFT, s",
        "P99, s",
        "longest, s",
        "P99 TBT, ms",
        "adapter hits",
        "loaded, GB",
        "bypassed, squashed",
        "answered in the window",
    )
    runs = tuple(run for preset, load, windows in cases for run in load_runs(preset, load, windows, seeds=FIRST))
    return Table(title, headings, runs, rows)


SCHEDULERS = (S_LORA, "chameleon:sjf", NO_CACHE, CHAMELEON)


def _by_minute(made: Sequence[Any]) -> list[Series]:
    return [
        Series(preset, range(1, len(each["ttft_p99_by_minute_s"]) + 1), each["ttft_p99_by_minute_s"])
        for preset, each in zip(SCHEDULERS, made, strict=True)
    ]


PREDICTED = tuple((preset, share) for preset in (CHAMELEON, "chameleon:output-only") for share in (1.0, 0.8, 0.6))


def _predicted_rows(made: Sequence[Any]) -> list[list[str]]:
    return [
        [preset, f"{share:.0%}", f"{each['ttft_p50_s']:.2f}", f"{each['ttft_p99_s']:.2f}"]
        for (preset, share), each in zip(PREDICTED, made, strict=True)
    ]


def _large_rows(made: Sequence[Any]) -> list[list[str]]:
    return [
        [model, str(large.adapters), f"{each[S_LORA]:.2f}", f"{each[CHAMELEON]:.2f}"]
        for (model, large), each in zip(LARGE.items(), made, strict=True)
    ]


def _first(runs: Sequence[Run]) -> Run:
    return runs[0]


AT_ALL_LOADS = tuple(run for preset in (S_LORA, CHAMELEON) for load in LOADS for run in load_runs(preset, load))

PAPER = Paper(
    measurements=[
        Measurement(
            "The grid, and S-LoRA's printed figures",
            A40 | FEW,
            {
                "slo-knee-slora": mean_of(knee_runs(S_LORA), float),
                "char-load-share-max": _of_chosen("load_percent"),
                "char-adapter-share-r128": _of_chosen("adapter_percent"),
            },
            tables=[GRID_TABLE],
        ),
        Measurement(
            "TTFT and TBT at 6, 8 and 9 requests/s",
            A40 | FIVE | {"high load": f"beyond S-LoRA's printed knee: {LONG} windows; one window is in the table"},
            {
                "p99-ttft-low": _less(CHAMELEON, "low", "p99"),
                "p99-ttft-medium": _less(CHAMELEON, "medium", "p99"),
                "p99-ttft-high": _less(CHAMELEON, "high", "p99", windows=LONG),
                "p50-ttft-low": _less(CHAMELEON, "low", "p50"),
                "p50-ttft-medium": _less(CHAMELEON, "medium", "p50"),
                "p50-ttft-high": _less(CHAMELEON, "high", "p50", windows=LONG),
                "tbt-slo": Figure(AT_ALL_LOADS, _largest_tbt_ms),
                "squash-rate": Figure(
                    tuple(run for load in LOADS for run in load_runs(CHAMELEON, load)),
                    lambda made: max(100 * float(each["squashed_share"]) for each in made),
                ),
            },
            tables=[
                _load_table(
                    "Systems, seed 1",
                    [(preset, load, 1) for load in LOADS for preset in (S_LORA, CHAMELEON)]
                    + [(preset, "high", LONG) for preset in OTHERS],
                )
            ],
            plots=[
                Plot(
                    "P99 TTFT over time at 9 requests/s",
                    "minute",
                    "P99 TTFT of the minute's arrivals, s",
                    tuple(_first(load_runs(preset, "high", LONG, seeds=FIRST)) for preset in SCHEDULERS),
                    _by_minute,
                    log_y=True,
                )
            ],
        ),
        Measurement(
            "Knees",
            A40 | FEW | {"knee": "rate at which P99 TTFT begins to miss the chosen limit, interpolated between rates"},
            {
                "slo-knee-chameleon": mean_of(knee_runs(CHAMELEON), float),
                "throughput-a40": _ratio(CHAMELEON),
                "throughput-nosched": _ratio(NO_SCHEDULER),
                "throughput-nocache": _ratio(NO_CACHE),
            },
        ),
        Measurement(
            "Eviction and prefetch",
            A40 | FIVE | {"load": "8 requests/s", "scheduler of the cache's variants": "S-LoRA's, as 5.3 augments it"},
            {
                "evict-lru": _less("chameleon:lru", "medium", "p99"),
                "evict-fairshare": _less("chameleon:fairshare", "medium", "p99"),
                "evict-chameleon": _less(NO_SCHEDULER, "medium", "p99"),
                "evict-chameleon-vs-fairshare-r128": compared(
                    reduction,
                    load_runs(NO_SCHEDULER, "medium"),
                    load_runs("chameleon:fairshare", "medium"),
                    lambda each: each["ttft_p99_by_rank_s"]["128"],
                ),
                "prefetch-extra": _less("chameleon:prefetch", "medium", "p99", base=CHAMELEON),
                "prefetch-accuracy": mean_of(
                    load_runs("chameleon:prefetch", "medium"),
                    lambda each: 100 * each["prefetched_used"] / max(1, each["prefetched"]),
                ),
            },
            tables=[_load_table("Caches, seed 1", [(preset, "medium", 1) for preset in (S_LORA, *CACHES)])],
        ),
        Measurement(
            "Larger models and other memory sizes",
            A40
            | TWO
            | {
                "model and device": "Llama-2-7B with 500, Llama-2-13B with 100, LLaMA-30B with 10 adapters on an A100 "
                "80 GB; 7B also with the device limited to 48 and 24 GB; 13B and 30B scaled from 7B's tables",
                "adapters": "a fifth of them of each rank",
                "window": "5 × the longest answer at five times the decode step of one sequence",
                "low, medium and high load": "6, 8 and 9 8.7ths of S-LoRA's knee of the model",
                "tokens per second": "knee times the mean tokens of a request, prompt and answer",
            },
            {
                **{f"scale-p99-{model}": _large_reduction(model) for model in ("7b", "13b", "30b")},
                **{f"scale-thr-{model}": _large_ratio(model) for model in ("7b", "13b", "30b")},
                **{
                    f"scale-tok-{model}-{name}": _large_tokens(model, preset)
                    for model in ("13b", "30b")
                    for name, preset in (("slora", S_LORA), ("chameleon", CHAMELEON))
                },
                "mem-thr-7b-24gb": _large_ratio("7b-24gb"),
                "mem-thr-7b-48gb": _large_ratio("7b-48gb"),
                "mem-thr-7b-80gb": _large_ratio("7b"),
                "compute-thr-a100": _large_ratio("7b"),
            },
            tables=[
                Table(
                    "Knees on an A100, seed 1",
                    ("model", "adapters", "S-LoRA, requests/s", "Chameleon, requests/s"),
                    tuple(_first(large_knee_runs(model)) for model in LARGE),
                    _large_rows,
                )
            ],
        ),
        Measurement(
            "Predictors",
            A40 | {"load": f"9 requests/s, {LONG} windows", "seeds": "one"},
            {},
            tables=[
                Table(
                    "TTFT by accuracy of the predictor, seed 1",
                    ("preset", "right", "P50 TTFT, s", "P99 TTFT, s"),
                    tuple(_first(load_runs(preset, "high", LONG, share, FIRST)) for preset, share in PREDICTED),
                    _predicted_rows,
                )
            ],
        ),
    ],
)
