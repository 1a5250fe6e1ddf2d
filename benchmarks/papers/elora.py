"""ELORA: its system, ablations and rivals, and their figures beside the printed ones.

Shi and others, "ELORA: Efficient LoRA and KV Cache Management for Multi-LoRA LLM Serving". ``elora_work`` defines the
runs, ``elora_readings`` other readings of the cost model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.papers.elora_manager import ADAPTERS as MANAGED_ADAPTERS
from benchmarks.papers.elora_manager import QUERIES, TURN_TOKENS, TURNS, manager_costs
from benchmarks.papers.elora_readings import ADAPTERS, LOAD, POOL, READINGS
from benchmarks.papers.elora_readings import SEEDS as READING_SEEDS
from benchmarks.papers.elora_readings import runs_of as reading_runs
from benchmarks.papers.elora_work import (
    AGENT,
    CHATBOT,
    MAX_NUM_SEQS,
    MAX_STEP_TOKENS,
    PAST_FULL,
    RANKS,
    SERVICES,
    STAGES,
    TRANSLATION,
    WINDOW_ANSWERS,
    Case,
    demand_changes,
    profile_of,
    run_case,
)
from benchmarks.papers.measure import SEEDS as ALL_SEEDS
from benchmarks.papers.measure import (
    Answer,
    Figure,
    Measurement,
    Paper,
    Plot,
    Run,
    Series,
    Table,
    increase,
    over_seeds,
    reduction,
    times,
)
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.memory.packing import pack
from lorikeet.workloads.synthetic import synthetic_adapters

OURS, VLLM, VLLM_HOST, S_LORA = "elora", "vllm-static:discard", "vllm-static", "elora:s-lora"
SLO_S = 0.5
"""Limit on the mean TTFT: the peak load is the highest rate that keeps it (VIII-A)."""
PAIRS = (
    ("8B", 20),
    ("34B", 50),
    ("70B", 100),
    ("8B", 100),
    ("34B", 20),
    ("70B", 50),
    ("8B", 50),
    ("34B", 100),
    ("70B", 20),
)
"""Models and numbers of adapters.

With a seed, each service has a different one of them, so that the nine cases of three seeds have all nine.
"""
SEEDS = ALL_SEEDS[:3]
SHIFTS = {"chatbot": 0, "translation": 3, "agent": 6}
ORACLE_SHARES = {
    20: (0.05, 0.1, 0.2),
    50: (0.1, 0.2, 0.25, 0.3),
    100: (0.1, 0.2, 0.3, 0.4, 0.5),
}
"""Shares of the pool by number of adapters. All of the adapters fit in 0.1, 0.24 and 0.49 of the pool."""
ORACLE_SEEDS = {20: 1, 50: 2, 100: 3}
MANY = [(1000, "uniform"), (2000, "distinct"), (1000, "skewed:50")]
"""Distributions of VIII-I. The standard deviation is a twentieth of the adapters; the paper does not print it."""

Result = Mapping[str, Any]


def case_of(service: str, seed: int) -> Case:
    """Return a service's case of a seed."""
    model, adapters = PAIRS[(SHIFTS[service] + seed - 1) % len(PAIRS)]
    return Case(service, model, adapters, seed)


def cases_of(services: Sequence[str] = tuple(SERVICES)) -> list[Case]:
    """Return all cases of some services, grouped by seed."""
    return [case_of(service, seed) for seed in SEEDS for service in services]


HOST_CASES = [case for case in cases_of() if case.seed == 2]
"""Cases on which vLLM with evicted KV on the host also runs."""


def chat_34b(adapters: int, seed: int) -> Case:
    """Return the chatbot on 34B, on which the paper compares policies."""
    return Case("chatbot", "34B", adapters, seed)


def runs(preset: str, cases: Sequence[Case]) -> tuple[Run, ...]:
    """Return a system's runs."""
    return tuple(Run(run_case, (preset, case)) for case in cases)


# --- from results to figures -------------------------------------------------------------------------


def stages(result: Result, key: str) -> np.ndarray:
    """Return the mean of the requests' figure by the stage in which they were due; NaN for a stage without requests."""
    at = np.minimum(np.array(result["due_s"]) / result["stage_s"], STAGES - 1).astype(int)
    values = np.array([np.nan if each is None else each for each in result[key]])
    return np.array(
        [
            np.nanmean(values[at == stage]) if (~np.isnan(values[at == stage])).any() else np.nan
            for stage in range(STAGES)
        ]
    )


def peak_of(result: Result) -> float:
    """Return the rate at which a stage's mean TTFT exceeds its limit, interpolated between stages by its logarithm."""
    means, rates = stages(result, "ttft_s"), result["rates"]
    for stage, mean in enumerate(means):
        if mean > SLO_S:
            if stage == 0:
                return float(rates[0])
            before = means[stage - 1]
            share = np.log(SLO_S / before) / np.log(mean / before)
            return float(rates[stage - 1] + share * (rates[stage] - rates[stage - 1]))
    return float(rates[-1])


def up_to_peak(ours: Result) -> int:
    """Return the number of stages whose rates are up to ELORA's peak, which are the paper's ten rates."""
    return max(1, int(np.sum(np.array(ours["rates"]) <= peak_of(ours) + 1e-9)))


Pair = Callable[[Result, Result], float]
"""A figure that compares ELORA's result with another system's, on the same case."""


def by_stage(change: Callable[[float, float], float], key: str, *, ours_first: bool) -> Pair:
    """Return the mean over rates of a change between two systems."""

    def pair(ours: Result, theirs: Result) -> float:
        last = up_to_peak(ours)
        mine, others = stages(ours, key)[:last], stages(theirs, key)[:last]
        pairs = zip(mine, others, strict=True) if ours_first else zip(others, mine, strict=True)
        return float(np.nanmean([change(one, other) for one, other in pairs]))

    return pair


def percentile(key: str, percent: float) -> Pair:
    """Return the reduction of a percentile over all requests up to ELORA's peak."""

    def of(result: Result, last: int) -> float:
        due = np.array(result["due_s"]) < last * result["stage_s"]
        values = np.array([np.nan if each is None else each for each in result[key]])[due]
        return float(np.nanpercentile(values, percent))

    return lambda ours, theirs: reduction(of(ours, up_to_peak(ours)), of(theirs, up_to_peak(ours)))


def over_cases(theirs: str, pair: Pair, cases: Sequence[Case]) -> Figure:
    """Return the mean of a figure over cases, with its interval over seeds."""
    count = len(cases)

    def of(made: Sequence[Any]) -> Answer:
        by_seed: dict[int, list[float]] = {}
        for case, ours, other in zip(cases, made[:count], made[count:], strict=True):
            by_seed.setdefault(case.seed, []).append(pair(ours, other))
        return over_seeds([float(np.mean(values)) for values in by_seed.values()])

    return Figure((*runs(OURS, cases), *runs(theirs, cases)), of)


def one_system(preset: str, value: Callable[[Result], float], cases: Sequence[Case]) -> Figure:
    """Return the mean of one system's figure over cases, with its interval over seeds."""

    def of(made: Sequence[Any]) -> Answer:
        by_seed: dict[int, list[float]] = {}
        for case, result in zip(cases, made, strict=True):
            by_seed.setdefault(case.seed, []).append(value(result))
        return over_seeds([float(np.mean(values)) for values in by_seed.values()])

    return Figure(runs(preset, cases), of)


def ttft(change: Callable[[float, float], float], *, ours_first: bool) -> Pair:
    """Compare mean TTFT."""
    return by_stage(change, "ttft_s", ours_first=ours_first)


def tpot(change: Callable[[float, float], float], *, ours_first: bool) -> Pair:
    """Compare mean TPOT."""
    return by_stage(change, "tpot_s", ours_first=ours_first)


TTFT_LESS, TPOT_LESS = ttft(reduction, ours_first=True), tpot(reduction, ours_first=True)
TTFT_TIMES, TPOT_TIMES = ttft(times, ours_first=False), tpot(times, ours_first=False)


def peak_more(ours: Result, theirs: Result) -> float:
    """Return the percentage by which ELORA's peak is higher."""
    return increase(peak_of(ours), peak_of(theirs))


def peak_less(ours: Result, theirs: Result) -> float:
    """Return the percentage by which the other's peak is lower."""
    return reduction(peak_of(theirs), peak_of(ours))


def hit_rate(result: Result) -> float:
    """Return the plain mean of the hit rates of adapters and of KV."""
    return float(result["adapter_hit_rate"] + result["kv_hit_rate"]) / 2


# --- single figures ----------------------------------------------------------------------------------


def wins(made: Sequence[Any]) -> float:
    """Return the percentage of cases in which TTFT, TPOT and peak are better than vLLM's and S-LoRA's."""
    count = len(made) // 3
    won = [
        all(pair(ours, other) > 0 for other in others for pair in (TTFT_LESS, TPOT_LESS, peak_more))
        for ours, *others in zip(made[:count], made[count : 2 * count], made[2 * count :], strict=True)
    ]
    return 100 * float(np.mean(won))


def lowest_parts(made: Sequence[Any]) -> float:
    """Return the percentage of services in which ELORA's waits in the queue, for adapters and for KV are shortest.

    Waits for KV are compared with vLLM's alone: S-LoRA never waits for KV, since it keeps no KV.
    """
    count = len(made) // 3
    lowest = []
    for service in SERVICES:
        here = [place for place, case in enumerate(HOST_CASES) if case.service == service]
        ours, vllm, s_lora = (
            {
                part: np.mean([made[start + place]["parts_s"][part] for place in here])
                for part in ("queue", "adapter", "kv")
            }
            for start in (0, count, 2 * count)
        )
        others = [(part, each) for part in ("queue", "adapter") for each in (vllm, s_lora)]
        lowest.append(all(ours[part] <= each[part] for part, each in [*others, ("kv", vllm)]))
    return 100 * float(np.mean(lowest))


def in_use(result: Result, last: int) -> float:
    """Return the mean share of the pool that adapters and KV take, over the first stages."""
    shares = np.sum([result[f"{part}_share"] for part in ("history", "adapter", "running")], axis=0)
    return float(shares[np.array(result["sampled_s"]) < last * result["stage_s"]].mean())


def times_in_use(ours: Result, theirs: Result) -> float:
    """Return ELORA's memory in use divided by the other's, at the rates up to ELORA's peak."""
    return times(in_use(ours, up_to_peak(ours)), in_use(theirs, up_to_peak(ours)))


def near_low(result: Result) -> float:
    """Return the percentage of samples in which the number of adapters is at most 5 % below Low.

    Equation 4 wants at least Low adapters, and allows more: while memory is idle, all adapters are loaded (Fig. 14a).
    """
    return 100 * float(np.mean([count >= 0.95 * low for count, low in result["adapters_low"] if low > 0]))


REPEATS = 20
"""Number of repeats of each case in the paper (VIII-B)."""


def standard_error(made: Sequence[Any]) -> float:
    """Return the standard error of the mean TTFT of ``REPEATS`` repeats in percent, from the seeds' deviation."""
    means = [np.nanmean(stages(each, "ttft_s")[: up_to_peak(each)]) for each in made]
    return 100 * float(np.std(means, ddof=1) / np.sqrt(REPEATS) / np.mean(means))


def slots(share: float) -> float:
    """Return the adapters of the largest rank that a share of 34B's pool holds."""
    profile = profile_of("34B")
    (largest,) = synthetic_adapters(1, (max(RANKS),), profile.geometry, modules=LORA_MODULES)
    blocks = pack(largest.ranks, profile.geometry, profile.geometry.block_elements(32)).blocks
    return share * profile.pool_bytes / (blocks * profile.geometry.block_bytes(32))


def last_stage(result: Result, key: str) -> np.ndarray:
    """Return the samples of the last stage."""
    first = (STAGES - 1) * result["stage_s"]
    inside = [first <= at < first + result["stage_s"] for at in result["sampled_s"]]
    return np.array(result[key])[inside]


ORACLE_CASES = [chat_34b(count, ORACLE_SEEDS[count]) for count in ORACLE_SHARES]
ORACLE_RUNS = tuple(
    Run(run_case, (f"{VLLM},adapter_share={share:g}", case))
    for case in ORACLE_CASES
    for share in ORACLE_SHARES[case.adapters]
)


def by_share(made: Sequence[Any]) -> list[tuple[Case, Result, list[tuple[float, Result]]]]:
    """Return, for each number of adapters, ELORA's result and vLLM's by share."""
    results = iter(made[len(ORACLE_CASES) :])
    return [
        (case, ours, [(share, next(results)) for share in ORACLE_SHARES[case.adapters]])
        for case, ours in zip(ORACLE_CASES, made, strict=False)
    ]


def best_of(ours: Result, shares: Sequence[tuple[float, Result]]) -> tuple[float, Result]:
    """Return the share with the lowest TTFT relative to ELORA's, and its result."""
    return shares[int(np.argmin([TTFT_TIMES(ours, each) for _, each in shares]))]


def oracle(pair: Pair) -> Figure:
    """Return a figure of the best split of each number of adapters, the mean over them."""

    def of(made: Sequence[Any]) -> Answer:
        return over_seeds([pair(ours, best_of(ours, shares)[1]) for _, ours, shares in by_share(made)])

    return Figure((*runs(OURS, ORACLE_CASES), *ORACLE_RUNS), of)


def best_share(made: Sequence[Any]) -> float:
    """Return the largest of the best shares."""
    return max(best_of(ours, shares)[0] for _, ours, shares in by_share(made))


MANY_CASES = [Case("chatbot", "34B", count, seed, choice) for seed, (count, choice) in enumerate(MANY, start=1)]


def many(pair: Pair) -> Figure:
    """Return a figure over both baselines with thousands of adapters, with its interval over distributions."""
    count = len(MANY_CASES)

    def of(made: Sequence[Any]) -> Answer:
        return over_seeds(
            [
                float(np.mean([pair(ours, vllm), pair(ours, s_lora)]))
                for ours, vllm, s_lora in zip(made[:count], made[count : 2 * count], made[2 * count :], strict=True)
            ]
        )

    return Figure((*runs(OURS, MANY_CASES), *runs(VLLM, MANY_CASES), *runs(S_LORA, MANY_CASES)), of)


# --- tables and plots --------------------------------------------------------------------------------


def case_rows(cases: Sequence[Case], made: Sequence[Any]) -> list[list[Any]]:
    """Return a row for each case: ELORA's figures, and its reductions of TTFT and TPOT against each other system."""
    count, rows = len(cases), []
    for place, case in enumerate(cases):
        ours, *others = (made[start + place] for start in range(0, len(made), count))
        row = [case.service, case.model, case.adapters, case.seed, f"{peak_of(ours):.1f}"]
        row.append(f"{np.nanmean(stages(ours, 'ttft_s')[: up_to_peak(ours)]) * 1e3:.1f}")
        for other in others:
            row += [f"{TTFT_LESS(ours, other):.1f}", f"{TPOT_LESS(ours, other):.1f}", f"{peak_more(ours, other):.1f}"]
        rows.append(row)
    return rows


def invalid_rows(cases: Sequence[Case], made: Sequence[Any]) -> list[list[Any]]:
    """Return a row for each service: invalid KV without and with the tree, and the ratio of their TTFTs."""
    found: dict[str, list[tuple[Result, Result]]] = {}
    for case, without, ours in zip(cases, made[: len(cases)], made[len(cases) :], strict=True):
        found.setdefault(case.service, []).append((without, ours))
    rows = []
    for service, pairs in found.items():
        shares = [[f"{100 * each['invalid_kv_share']:.1f}" for each in system] for system in zip(*pairs, strict=True)]
        ratios = [np.mean(without["ttft_s"]) / np.mean(ours["ttft_s"]) for without, ours in pairs]
        rows.append([service, *(", ".join(each) for each in shares), ", ".join(f"{ratio:.3f}" for ratio in ratios)])
    return rows


def reading_rows(made: Sequence[Any]) -> list[list[Any]]:
    """Return a row for each reading: the mean ratio of its TTFT to LRU's, and the contents of the device."""
    results = iter(made)
    found = {reading: {service: [next(results) for _ in READING_SEEDS] for service in SERVICES} for reading in READINGS}
    lru = found["LRU (elora:wos)"]
    rows = []
    for reading, by_service in found.items():
        row = [reading]
        for service, mine in by_service.items():
            ratios = [one["ttft_s"] / other["ttft_s"] for one, other in zip(mine, lru[service], strict=True)]
            row += [f"{np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
            row += [f"{np.mean([each[key] for each in mine]):.1%}" for key in ("adapter_hit_rate", "kv_hit_rate")]
        rows.append(row)
    return rows


def ttft_lines(made: Sequence[Any]) -> list[Series]:
    """Return mean TTFT over rate."""
    labels = ("ELORA", "vLLM, discards KV", "S-LoRA")
    return [
        Series(label, result["rates"], (stages(result, "ttft_s") * 1e3).tolist())
        for label, result in zip(labels, made, strict=True)
    ]


def memory_lines(made: Sequence[Any]) -> list[Series]:
    """Return the contents of ELORA's device over time."""
    (result,) = made
    keys = {"history KV": "history_share", "adapters": "adapter_share", "running KV": "running_share"}
    return [Series(label, result["sampled_s"], [100 * share for share in result[key]]) for label, key in keys.items()]


def share_lines(made: Sequence[Any]) -> list[Series]:
    """Return TTFT divided by ELORA's, by vLLM's share for adapters."""
    return [
        Series(
            f"{case.adapters} adapters", [share for share, _ in shares], [TTFT_TIMES(ours, each) for _, each in shares]
        )
        for case, ours, shares in by_share(made)
    ]


# --- the paper ---------------------------------------------------------------------------------------

_HARDWARE = "8B on one H800 of 80 GB, 34B on four, 70B on eight, each rank its own PCI Express 5.0 link; host 256 GB"
_LENGTHS = (
    f"chatbot: {CHATBOT.turns:g} turns, prompts of 52.3 and answers of 189.5 tokens on average (LMSYS-33k), answers cut"
    f" to {CHATBOT.answer.most if CHATBOT.answer else 0}; translation: sentences of median"
    f" {TRANSLATION.sentence.median:g}, at most {TRANSLATION.sentence.most}, behind 32 tokens that a pair of languages"
    f" shares; agent: {AGENT.turns:g} turns of median {AGENT.utterance.median:g} and at most {AGENT.utterance.most}"
    " tokens behind 128 that a scene shares (Taskmaster-1)"
)
_SETTING = {
    "model, device": _HARDWARE,
    "adapters": "20, 50 or 100 of ranks 32 and 64 on all seven linear modules, all on the host",
    "near Low": "no more than 5 % fewer adapters than Low: Eq. 4 does not mind more, and while memory is idle all are"
    " loaded (Fig. 14a)",
    "standard error": f"of {REPEATS} repeats, by the deviation of three seeds",
    "pool": "0.9 of device memory less the weights: 61, 242 and 481 GB; full of earlier texts when the window begins",
    "lengths": _LENGTHS,
    "arrivals": "chatbot: Poisson, adapters by Zipf's law; others: gamma gaps of variation 2 for each adapter,"
    " popularity of Azure's functions",
    "load": f"ten stages of rising rate, the last {PAST_FULL:g} times what a full batch serves; latencies and memory in"
    " use are means over the stages up to ELORA's peak, each with equal weight; hit rates, tokens and bytes are of all",
    "KV": "of all heads: 16 MB for a block of 32 tokens of 8B, as printed",
    "window": f"{WINDOW_ANSWERS} times the longest answer in a batch a quarter full, at least a dialogue; all requests"
    " are answered",
    "batch": f"{MAX_NUM_SEQS:,} sequences and {MAX_STEP_TOKENS:,} tokens: vLLM's defaults on such devices",
    "prefill time": "from the end of a request's waits for memory, adapter and KV to its first token, mean of requests",
    "seeds": "three, on each of which a service has another model and number of adapters; the nine cases have all nine;"
    " systems get the same requests",
}


def _against(rival: str, name: str) -> dict[str, Figure]:
    cases = cases_of()
    return {
        f"ttft-red-{name}": over_cases(rival, TTFT_LESS, cases),
        f"tpot-red-{name}": over_cases(rival, TPOT_LESS, cases),
        f"peak-inc-{name}": over_cases(rival, peak_more, cases),
        f"ttft-p99-red-{name}": over_cases(rival, percentile("ttft_s", 99), cases),
        f"ttft-p95-red-{name}": over_cases(rival, percentile("ttft_s", 95), cases),
        f"tpot-p99-red-{name}": over_cases(rival, percentile("tpot_s", 99), cases),
        f"tpot-p95-red-{name}": over_cases(rival, percentile("tpot_s", 95), cases),
        f"prefill-time-{name}": over_cases(
            rival, lambda ours, other: other["parts_s"]["prefill"] / ours["parts_s"]["prefill"], cases
        ),
        f"mem-util-{name}": over_cases(rival, times_in_use, cases),
        f"hit-rate-{name}": over_cases(rival, lambda ours, other: hit_rate(ours) / hit_rate(other), cases),
    }


def _ablation(name: str, preset: str, cases: Sequence[Case], *, peak: bool = True) -> dict[str, Figure]:
    figures = {
        f"{name}-ttft": over_cases(preset, TTFT_TIMES, cases),
        f"{name}-tpot": over_cases(preset, TPOT_TIMES, cases),
    }
    return figures | ({f"{name}-peak": over_cases(preset, peak_less, cases)} if peak else {})


_ALL = cases_of()
_THREE = (*runs(OURS, _ALL), *runs(VLLM, _ALL), *runs(S_LORA, _ALL))
_CHAT = cases_of(("chatbot",))
_IN_TURN = [case_of(tuple(SERVICES)[seed % 3], seed) for seed in SEEDS]
_SHORT = [
    Case(service, "8B", ADAPTERS, seed, load=2 * LOAD, pool=POOL, window=0.5) for service in SERVICES for seed in SEEDS
]
_POLICY = [chat_34b(50, seed) for seed in SEEDS]
_LIGHT = Case("chatbot", "34B", 100, 1, load=0.1 / PAST_FULL, filled=False)
_BUSY = ORACLE_CASES[-1]

_MAIN = Measurement(
    "Latency and peak load (VIII-B, VIII-C)",
    _SETTING,
    {
        **_against(VLLM, "vllm"),
        **_against(S_LORA, "slora"),
        "wins-all-cases": Figure(_THREE, wins),
        "ttft-red-vllm-translation": over_cases(VLLM, TTFT_LESS, cases_of(("translation",))),
        "ttft-red-vllm-other": over_cases(VLLM, TTFT_LESS, cases_of(("chatbot", "agent"))),
        "ttft-red-slora-agent": over_cases(S_LORA, TTFT_LESS, cases_of(("agent",))),
        "ttft-red-slora-other": over_cases(S_LORA, TTFT_LESS, cases_of(("chatbot", "translation"))),
        "breakdown-lowest": Figure(
            (*runs(OURS, HOST_CASES), *runs(VLLM_HOST, HOST_CASES), *runs(S_LORA, HOST_CASES)), lowest_parts
        ),
        "invalid-kv-vllm": one_system(VLLM, lambda result: 100 * result["invalid_kv_share"], _ALL),
        "invalid-kv-elora": one_system(OURS, lambda result: 100 * result["invalid_kv_share"], _ALL),
        "lora-count-near-low": one_system(OURS, near_low, _ALL),
        "swap-per-query": one_system(
            OURS, lambda result: 1e3 * (result["parts_s"]["adapter"] + result["parts_s"]["kv"]), _ALL
        ),
    },
    plots=[
        Plot(
            f"Mean TTFT over load: {case.service}, {case.model}, {case.adapters} adapters",
            "requests/s",
            "mean TTFT, ms",
            (*runs(OURS, [case]), *runs(VLLM, [case]), *runs(S_LORA, [case])),
            ttft_lines,
            log_y=True,
        )
        for case in (case_of("chatbot", 4), case_of("translation", 1), case_of("agent", 3))
    ],
    tables=[
        Table(
            "All cases: ELORA's peak in requests/s and mean TTFT in ms; by how many percent its TTFT and TPOT are less"
            " and its peak is higher, against vLLM that discards KV, and S-LoRA",
            ["service", "model", "adapters", "seed", "peak", "TTFT", *2 * ["TTFT less", "TPOT less", "peak more"]],
            _THREE,
            lambda made: case_rows(_ALL, made),
        ),
        Table(
            "The same against vLLM that keeps evicted KV on the host",
            ["service", "model", "adapters", "seed", "peak", "TTFT", "TTFT less", "TPOT less", "peak more"],
            (*runs(OURS, HOST_CASES), *runs(VLLM_HOST, HOST_CASES)),
            lambda made: case_rows(HOST_CASES, made),
        ),
    ],
)
_MANAGER = Measurement(
    "Without the tree, and with LRU (VIII-E, VIII-F)",
    {"systems": "elora:wom, elora:wos", "cases": "of above, a service after the other by seed"},
    {
        **_ablation("wom", "elora:wom", _IN_TURN),
        **_ablation("wos", "elora:wos", _IN_TURN),
        "wom-invalid-kv": one_system("elora:wom", lambda result: 100 * result["invalid_kv_share"], _IN_TURN),
    },
    tables=[
        Table(
            f"Invalid KV where memory is short, in percent of the cached (seeds {SEEDS[0]} to {SEEDS[-1]}). 8B,"
            f" {ADAPTERS} adapters, a pool of {POOL:g} of the device's, constant {2 * LOAD:g} of the last stage's rate",
            ["service", "without the tree", "with it", "TTFT without it, times ELORA's"],
            (*runs("elora:wom", _SHORT), *runs(OURS, _SHORT)),
            lambda made: invalid_rows(_SHORT, made),
        )
    ],
)
_FACTORS = Measurement(
    "Without factors of the cost model (VIII-G)",
    {
        "systems": "elora:wol, elora:wov, elora:wou; without cost ELORA is itself, since each node is one block",
        "cases": "the chatbot's of above",
    },
    {
        **_ablation("wol", "elora:wol", _CHAT),
        **_ablation("woc", OURS, _CHAT),
        **_ablation("wov", "elora:wov", _CHAT),
        **_ablation("wou", "elora:wou", _CHAT),
    },
    tables=[
        Table(
            f"Readings of the cost model: mean TTFT over LRU's (seeds {READING_SEEDS[0]} to {READING_SEEDS[-1]}, lowest"
            f" and highest), hit rates of adapters and of KV. 8B, {ADAPTERS} adapters, a pool of {POOL:g} of the"
            f" device's, constant {LOAD:g} of the last stage's rate",
            ["reading", *(f"{service}{what}" for service in SERVICES for what in (", TTFT", ", adapters", ", KV"))],
            tuple(run for preset in READINGS.values() for service in SERVICES for run in reading_runs(preset, service)),
            reading_rows,
        )
    ],
)
_POLICIES = Measurement(
    "Other policies (VIII-H)",
    {"systems": "elora:bfs, rrip, hawkeye, halp", "cases": "chatbot on 34B with 50 adapters, three seeds"},
    {
        **_ablation("bfs", "elora:bfs", _POLICY, peak=False),
        **_ablation("rrip", "elora:rrip", _POLICY, peak=False),
        **_ablation("hawkeye", "elora:hawkeye", _POLICY, peak=False),
        **_ablation("halp", "elora:halp", _POLICY, peak=False),
        "bfs-branch-max": Figure(
            runs(OURS, _POLICY), lambda made: 100 * max(float(each["largest_branch"]) for each in made)
        ),
        "bfs-mem-util": over_cases("elora:bfs", lambda ours, other: reduction(1.0, times_in_use(ours, other)), _POLICY),
        "bfs-pcie": over_cases("elora:bfs", lambda ours, other: other["moved_bytes"] / ours["moved_bytes"], _POLICY),
        "std-error": Figure(runs(OURS, _POLICY), standard_error),
    },
)
_OTHERS = Measurement(
    "Thousands of adapters, the best split, memory over time (VIII-D, VIII-I, VIII-J, III)",
    {
        "cases": "chatbot on 34B. 1,000 and 2,000 adapters, uniform, each request its own, or Gaussian with a deviation"
        " of a twentieth of them; the host holds all",
        "splits": "vLLM that discards KV with shares of 0.05 to 0.5 of the pool for adapters; the one with the least"
        " TTFT over ELORA's",
        "memory": "a light load on an empty device for VIII-D (a), the last stage for (c)",
        "changes of demand": "5 requests/s (the one rate that the paper prints), 34B, 50 adapters, from second to"
        " second: KV of running requests and their adapters",
    },
    {
        "large-n-ttft": many(TTFT_LESS),
        "large-n-tpot": many(TPOT_LESS),
        "oracle-ttft": oracle(ttft(increase, ours_first=False)),
        "oracle-tpot": oracle(tpot(increase, ours_first=False)),
        "oracle-monotone-after": Figure((*runs(OURS, ORACLE_CASES), *ORACLE_RUNS), best_share),
        "fig14-elora-all-loras": Figure(
            runs(OURS, [_LIGHT]), lambda made: 100 * float(made[0]["adapters_low"][-1][0]) / _LIGHT.adapters
        ),
        "fig14-elora-history-kv-drained": Figure(
            runs(OURS, [_BUSY]), lambda made: 100 * float(last_stage(made[0], "history_share").min())
        ),
        "motiv-vllm-lora-area-util": Figure((), lambda made: 100 * 29 / slots(0.2)),
        "trace-mem-variation": Figure(
            tuple(Run(demand_changes, (service,)) for service in SERVICES),
            lambda made: 100 * float(np.mean([each["mean"] for each in made])),
        ),
        "trace-mem-variation-over20": Figure(
            tuple(Run(demand_changes, (service,)) for service in SERVICES),
            lambda made: 100 * float(np.mean([each["over_20_percent"] for each in made])),
        ),
    },
    plots=[
        Plot(
            "vLLM's mean TTFT over ELORA's by the share of its pool for adapters, 34B",
            "share for adapters",
            "times ELORA's",
            (*runs(OURS, ORACLE_CASES), *ORACLE_RUNS),
            share_lines,
            log_y=True,
        ),
        Plot(
            "ELORA's device over time, 34B, 100 adapters", "time, s", "% of the pool", runs(OURS, [_BUSY]), memory_lines
        ),
    ],
)

MANAGER_COSTS = Run(manager_costs)


def _cost(key: str, unit: float = 1.0) -> Figure:
    return Figure((MANAGER_COSTS,), lambda made: unit * float(made[0][key]))


_OVERHEAD = Measurement(
    "The manager's own time and memory (VI-C, VII, VIII-L)",
    {
        "measured": "`elora`'s memory on a processor, without an engine: every transfer ends at once",
        "tree": "as large as the device's 61 GB and the host's 256 GB allow with 8B, in blocks of 32 tokens (16 MB): "
        "'Even if the GPU memory is fully utilized and the size of tree reaches the maximum' (VIII-L)",
        "queries": f"{QUERIES} turns, 5 a second, in dialogues of {TURNS} turns of {TURN_TOKENS} tokens behind those "
        f"before, {MANAGED_ADAPTERS} adapters; lengths are ours",
        "matching and updating": "keys of the prompt's blocks, match, visits, scores, and insertion of the new blocks; "
        "the bound of VII is held by the 99th percentile; "
        "a mean below the printed one keeps the claim, which was decided after trial runs of 0.30 ms",
        "swapping": "the 99th percentile of the swapper's ticks, one every 100 ms",
        "update of Eval": "the time of one node, of all nodes in one call: Eval is 'for each LoRA or KV' (VI-C)",
        "time": "of the processor, so that other processes count little",
    },
    {
        "tree-match-mean": _cost("query_mean_ms"),
        "tree-match-bound": _cost("query_most_ms"),
        "swap-overhead-max": _cost("tick_most_ms"),
        "eval-update-max": _cost("eval_us"),
        "tree-memory-max": _cost("tree_bytes", 1e-3),
        "mgr-metadata-bytes": _cost("node_bytes"),
    },
)

PAPER = Paper(
    measurements=[_MAIN, _MANAGER, _FACTORS, _POLICIES, _OTHERS, _OVERHEAD],
)
