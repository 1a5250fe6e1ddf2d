"""TOPPINGS' figures, modelled: cold starts on one server, and its scheduler on its clusters."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.papers.measure import (
    SEEDS,
    Run,
)
from benchmarks.papers.runs import Cluster, Engine, Figures, run_cluster, run_engine, work_of
from lorikeet.bench.arrivals import Rates, at_rate
from lorikeet.bench.load_report import RequestRecord
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.cluster.routing.base import PerformanceModel, fit_performance
from lorikeet.core.assist_costs import ASSISTED_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.core.prefill_pipeline import ComputePlace
from lorikeet.core.request import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.cold_prefill import assist_costs
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import Constant, CostProfile, Curve
from lorikeet.costs.transfers import TransferModel
from lorikeet.presets import resolve_preset

COMPOSED, SEVENTY_B, SEVEN_B = "a100-80-llama-2-7b@toppings", "a100-80x4-llama-2-70b@toppings", "printed"
"""The last is the first with steps as long as the paper prints them."""
OURS, CACHED, S_LORA, DLORA = "toppings", "cached", "toppings:s-lora", "dlora"
FEWER_CORES, ON_DEMAND, STRAWMAN = "toppings:fewer-cores", "toppings:on-demand", "toppings:strawman"
MEMORY_BYTES = 200 * 10**9
"""CACHED has unlimited memory (7.1). So have all here: it is not what they differ by."""
MAX_RUNNING = 1_000
"""Nothing waits for a slot."""
PREFILL_S = {256: 0.044, 1000: 0.090}
PROMPT_QUANTILES = {1.281552: 256, 2.326348: 1000}
"""Prompts of 256 and 1,000 tokens are longer than 90 and 99 % of LMSYS-Chat-1M's (Fig. 4), by normal quantile."""
LONGEST_TOKENS = 2048
EINSUM_SHARE = 0.389
"""Of the base's computation: what dLoRA's kernel for mixed adapters takes (dLoRA, section 4.1)."""
REQUESTS, GRID_REQUESTS = 300, 250
"""Of a run; the second of one that finds the cell."""
REPLICATED = 3.1
"""Bytes of an adapter on a rank of the 70B model over a fourth of it: A is on every rank whole (section 6)."""


# --- the conditions that the paper leaves open ---------------------------------------------------------


LINKS_GB_S = (1, 2, 3, 4, 6, 8, 12, 16)
ANSWER_TOKENS = (50, 100, 215)
"""Means of exponential lengths; the last is LMSYS-Chat-1M's (214.5, Zheng et al., 2024, table 1)."""
RATES = (3, 6, 9)
INTERRUPTED = {3: (13, 4), 6: (22, 10), 9: (29, 25)}
"""By requests per second, on-demand loading's mean share of serving time, percent, and median count (section 2.3)."""


class Cell(NamedTuple):
    """One cell of the grid of open conditions."""

    link_gb_s: float
    answer_tokens: int


CELLS = tuple(Cell(*each) for each in product(LINKS_GB_S, ANSWER_TOKENS))


class Setting(NamedTuple):
    """One of the paper's (Table 2 and 7.2): model, adapters and their rank, requests per second, and their choice."""

    profile: str
    adapters: int
    rank: int
    rate: float
    choice: str = "round-robin"


SETTINGS = {
    "S3": Setting(SEVEN_B, 200, 64, 9.0),
    "S5": Setting(SEVENTY_B, 200, 32, 3.0),
    "S6": Setting(SEVENTY_B, 200, 64, 3.0),
    "MAF 128": Setting(SEVEN_B, 128, 64, 1.5, "functions"),
    "MAF 256": Setting(SEVEN_B, 256, 64, 3.6, "functions"),
    "MAF 512": Setting(SEVEN_B, 512, 64, 7.7, "functions"),
    **{f"{rate}/s": Setting(SEVEN_B, 512, 64, float(rate), "functions") for rate in RATES},
}
"""The last are those of section 2.3."""


def run_case(cell: Sequence[float], setting: str, preset: str, seed: int, requests: int = REQUESTS) -> Figures:
    """Return the figures of a preset in a setting; what it prefetches is there at first."""
    open_conditions, about = Cell(cell[0], int(cell[1])), SETTINGS[setting]
    link_bytes_per_s = 1e9 * open_conditions.link_gb_s / (REPLICATED if about.profile == SEVENTY_B else 1)
    engine = Engine(
        profile=profile_of(about.profile),
        adapters=about.adapters,
        ranks=(about.rank,),
        modules=ASSISTED_MODULES,
        memory_bytes=MEMORY_BYTES,
        link_bytes_per_s=link_bytes_per_s,
        max_num_seqs=MAX_RUNNING,
        settle=True,
    )
    # dLoRA loads all adapters before it begins (7.1).
    preset = f"{DLORA},prefetch=all" if preset == DLORA else preset
    rates, names = Rates.constant(about.rate), tuple(adapter_names(about.adapters))
    recipe = Recipe(
        lengths=lengths(requests, open_conditions.answer_tokens, seed),
        rates=rates,
        count=requests,
        adapters=names,
        adapter_choice=about.choice,
        seed=seed,
    )
    work = work_of(at_rate(recipe.requests(), rates), names, seed)
    figures = run_engine(preset, engine, work, interruptions)
    return {name: value for name, value in figures.items() if name != "ttft_s"}


def interruptions(exchanges: Sequence[RequestRecord]) -> Figures:
    """Return how much of the requests' serving time their decoding is interrupted, and how often.

    Each request whose first token comes while another decodes interrupts it: "the i-th arrival interrupts the decoding
    of the ongoing i - 1 requests". The interruptions, loads and prefills, are what decoding takes longer than its steps
    would for as many requests as decode in that time on average.
    """
    first_s, last_s = np.array([(each.token_times_s[0], each.ended_s) for each in exchanges]).T
    decoded = np.array([each.output_tokens - 1 for each in exchanges])
    context = round(float(np.mean([each.input_tokens + each.output_tokens / 2 for each in exchanges])))
    one_s, ten_s = (decode_s(KernelForm.PADDED, batch, (SETTINGS["3/s"].rank,), context) for batch in (1, 10))
    counts = np.array(
        [np.sum((first_s > first) & (first_s < last)) for first, last in zip(first_s, last_s, strict=True)]
    )
    shares = []
    for each, first, last, steps in zip(exchanges, first_s, last_s, decoded, strict=True):
        if steps:
            together_s = np.clip(np.minimum(last_s, last) - np.maximum(first_s, first), 0, None).sum()
            step_s = one_s + (ten_s - one_s) / 9 * (together_s / (last - first) - 1)
            shares.append(max(0.0, last - first - steps * step_s) / (each.ended_s - each.due_s))
    return {"interrupted_share": float(np.mean(shares)), "interruptions": float(np.median(counts))}


def choose_cell(*made: Figures) -> tuple[float, int]:
    """Return the cell whose figures of on-demand loading are nearest to the printed ones, by their mean log ratio."""
    return min(cells_by_distance(made))[1]


def cells_by_distance(made: Sequence[Figures]) -> list[tuple[float, Cell]]:
    """Return each cell of the grid with its distance: the mean absolute logarithm of ours over the printed figures."""
    found = []
    for number, cell in enumerate(CELLS):
        own = made[number * len(RATES) : (number + 1) * len(RATES)]
        ratios = []
        for rate, figures in zip(RATES, own, strict=True):
            share, count = INTERRUPTED[rate]
            ratios += [100 * figures["interrupted_share"] / share, figures["interruptions"] / count]
        found.append((float(np.abs(np.log(np.maximum(ratios, 0.01))).mean()), cell))
    return found


GRID = tuple(
    Run(run_case, (tuple(cell), f"{rate}/s", ON_DEMAND, SEEDS[0], GRID_REQUESTS)) for cell in CELLS for rate in RATES
)
CELL = Run(choose_cell, after=GRID)


def cases(setting: str, preset: str) -> list[Run]:
    """Return the runs of a preset in a setting, one a seed, in the chosen cell."""
    return [Run(run_case, (setting, preset, seed), after=(CELL,)) for seed in SEEDS]


# --- costs -------------------------------------------------------------------------------------------


@cache
def profile_of(name: str) -> CostProfile:
    """Return a profile by name, :data:`SEVEN_B` among them."""
    return printed_steps() if name == SEVEN_B else load_profile(name)


def printed_steps() -> CostProfile:
    """Return the composed profile with steps on the line through the two prefills that the paper prints.

    Its steps take three times as long as the device would need: 28 ms and 62 us for a token. Decodes fit in: without
    adapters its lines begin at 32 and 34 ms for a batch whose context is not printed (Fig. 6).
    """
    profile = load_profile(COMPOSED)
    (few, few_s), (many, many_s) = PREFILL_S.items()
    source = "TOPPINGS, Fig. 4: prefills of 256 and 1,000 tokens"
    token_s = (many_s - few_s) / (many - few)
    once_s = few_s - few * token_s
    step = msgspec.structs.replace(
        profile.step,
        tokens=Curve("tokens", ((0, once_s), (few, few_s), (many, many_s)), source=source),
        sampled_rows=Curve("rows", ((1, 0.0),), source="in tokens"),
        prefill_attention=Constant(0.0, "s/pair", source="in tokens"),
    )
    # dLoRA's share is one of the base's computation, so of these steps.
    einsum = msgspec.structs.replace(
        profile.lora_costs(KernelForm.EINSUM),
        fixed=Constant(EINSUM_SHARE * once_s, "s", source=source),
        row=Constant(EINSUM_SHARE * token_s, "s/token", source=source),
    )
    return msgspec.structs.replace(profile, name=SEVEN_B, step=step, lora=profile.lora | {KernelForm.EINSUM: einsum})


def lengths(count: int, answer_tokens: int, seed: int) -> tuple[WorkloadRequest, ...]:
    """Return requests with prompts of the log-normal distribution that has both printed quantiles."""
    generator = np.random.default_rng(seed)
    (low, low_tokens), (high, high_tokens) = PROMPT_QUANTILES.items()
    sigma = np.log(high_tokens / low_tokens) / (high - low)
    prompts = generator.lognormal(np.log(low_tokens) - sigma * low, sigma, count)
    answers = generator.exponential(answer_tokens, count)
    tokens = np.clip(np.rint(np.stack([prompts, answers])), 1, LONGEST_TOKENS).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())


# --- performance models (section 5) ------------------------------------------------------------------


BATCHES, RANKS = (4, 8, 16, 32), (8, 16, 32, 64)
PROFILED_REQUESTS, R2 = 7_618, 0.96
PROFILING_SEED = 1_000
"""Not one of the evaluation's."""


def profiled(form: KernelForm, answer_tokens: int, *, prefill: bool) -> PerformanceModel:
    """Return PrePerf or DecPerf, fitted to steps of mixed ranks and lengths that are as noisy as the printed R²."""
    generator, model = np.random.default_rng(PROFILING_SEED), CostModel(profile_of(SEVEN_B), form)
    drawn = lengths(PROFILED_REQUESTS, answer_tokens, PROFILING_SEED)
    steps: list[tuple[list[int], float]] = []
    begin: int = 0
    while begin + max(BATCHES) <= len(drawn):
        own = drawn[begin : begin + int(generator.choice(BATCHES))]
        ranks = generator.choice(RANKS, len(own)).tolist()
        works = [
            SequenceWork(0, each.input_tokens, True, number, rank)
            if prefill
            else SequenceWork(each.input_tokens + each.output_tokens // 2, 1, True, number, rank)
            for number, (each, rank) in enumerate(zip(own, ranks, strict=True))
        ]
        steps.append((ranks, model.step_s(step_work(works, form))))
        begin += len(own)
    exact = fit_performance(form, steps)
    explained = np.var([exact.slope_s * work_of_ranks(form, ranks) for ranks, _ in steps])
    scatter = np.var([seconds for _, seconds in steps]) - explained
    noise_s = max(0.0, float(explained * (1 / R2 - 1) - scatter)) ** 0.5
    noisy = [(ranks, seconds + noise_s * float(generator.standard_normal())) for ranks, seconds in steps]
    return fit_performance(form, noisy)


def work_of_ranks(form: KernelForm, ranks: Sequence[int]) -> int:
    """Return what equation 2 multiplies with its slope."""
    return sum(ranks) if form is KernelForm.UNPADDED else len(ranks) * max(ranks)


def determination(form: str) -> float:
    """Return R² of the models of decode steps that were profiled without noise."""
    kernel_form, generator = KernelForm(form), np.random.default_rng(PROFILING_SEED)
    model = CostModel(profile_of(SEVEN_B), kernel_form)
    steps: list[tuple[list[int], float]] = []
    for _ in range(PROFILED_REQUESTS // 15):
        size = int(generator.choice(BATCHES))
        ranks = generator.choice(RANKS, size).tolist()
        contexts = lengths(size, ANSWER_TOKENS[1], int(generator.integers(2**31)))
        works = [
            SequenceWork(each.input_tokens + each.output_tokens // 2, 1, True, number, rank)
            for number, (each, rank) in enumerate(zip(contexts, ranks, strict=True))
        ]
        steps.append((ranks, model.step_s(step_work(works, kernel_form))))
    fitted = fit_performance(kernel_form, steps)
    seconds = np.array([each for _, each in steps])
    predicted = np.array([fitted.slope_s * work_of_ranks(kernel_form, ranks) + fitted.fixed_s for ranks, _ in steps])
    return float(1 - np.var(seconds - predicted) / np.var(seconds))


# --- clusters (section 7.4) --------------------------------------------------------------------------


class Place(NamedTuple):
    """Servers of a cluster, their adapters, requests per second, their choice, and the seconds of arrivals."""

    servers: int
    adapters: int
    rate: float
    choice: str
    window_s: float


SIMULATION = "simulation"
PLACES = {
    "30/s": Place(8, 200, 30.0, "uniform", 30.0),
    "40/s": Place(8, 200, 40.0, "uniform", 30.0),
    "50/s": Place(8, 200, 50.0, "uniform", 30.0),
    SIMULATION: Place(15, 10_000, 85.0, "functions", 20.0),
}
"""The testbed (Fig. 18), and a quarter of the simulated cluster of 60 servers and 40,000 functions (Fig. 19)."""
BY_DLORA, BY_CHANCE, FIRST_FIT = "toppings:dlora", "toppings:random", "toppings:first-fit"
SCHEDULERS = (OURS, BY_DLORA, BY_CHANCE, FIRST_FIT)
SLO_FACTOR, MAX_PACKED = 1.5, 64
"""Of the limit on TPT: times what the base model reaches without LoRA. First fit packs fewer in a step (5)."""
READINGS = ("alone", "loaded")
"""What the limit is 1.5 times of: the TPT of the base model with one request at a time, or under the same load."""
UNPADDED = ",kernel_form=unpadded"


def limits_of(cell: Sequence[float], place: str) -> list[float]:
    """Return the limit on TPT in seconds by reading."""
    about, answers = PLACES[place], int(cell[1])
    return [SLO_FACTOR * _base_tpt_s(answers, rate) for rate in (0.05, about.rate / about.servers)]


def _base_tpt_s(answer_tokens: int, rate: float) -> float:
    setting = Cluster(profile=profile_of(SEVEN_B), replicas=1, adapters=(), memory_bytes=MEMORY_BYTES)
    rates = Rates.constant(rate)
    recipe = Recipe(lengths=lengths(2_000, answer_tokens, SEEDS[0]), rates=rates, count=200, seed=SEEDS[0])
    return float(run_cluster(BY_CHANCE, setting, recipe.requests(), SEEDS[0])["tpt_mean_s"])


def run_place(
    cell: Sequence[float], limits_s: Sequence[float], place: str, preset: str, reading: str, seed: int
) -> Figures:
    """Return the figures of a preset at a place. How popular an adapter is has nothing to do with its rank.

    ``reading`` is of the limit that the preset schedules by; the share within both limits is counted.
    """
    about, profile, answers = PLACES[place], profile_of(SEVEN_B), int(cell[1])
    form = resolve_preset(preset)[1].kernel_form
    setting = Cluster(
        profile=profile,
        replicas=about.servers,
        adapters=tuple(synthetic_adapters(about.adapters, RANKS, profile.geometry, modules=ASSISTED_MODULES)),
        slo=Slo(tpot_s=limits_s[READINGS.index(reading)]),
        limits_s=tuple(limits_s),
        link_bytes_per_s=1e9 * cell[0],
        memory_bytes=MEMORY_BYTES,
        max_num_seqs=MAX_PACKED if preset.startswith(FIRST_FIT) else 256,
        since_s=about.window_s / 4,
        step_models=(
            profiled(form, answers, prefill=True),
            profiled(form, answers, prefill=False),
        ),
    )
    requests = Recipe(
        lengths=lengths(2_000, answers, seed),
        rates=Rates.constant(about.rate),
        duration_s=about.window_s,
        adapters=tuple(np.random.default_rng(seed).permutation(adapter_names(about.adapters)).tolist()),
        adapter_choice=about.choice,
        seed=seed,
    ).requests()
    made = run_cluster(preset, setting, requests, seed)
    return {name: made[name] for name in ("ttft_mean_s", "tpt_mean_s", "e2e_mean_s", "within")}


LIMITS = {place: Run(limits_of, (place,), after=(CELL,)) for place in PLACES}


def placed(place: str, preset: str, reading: str = READINGS[1]) -> list[Run]:
    """Return the runs of a preset at a place, one a seed. Only TOPPINGS' scheduler goes by the limit."""
    reading = reading if preset.startswith(OURS) and ":" not in preset else READINGS[1]
    return [Run(run_place, (place, preset, reading, seed), after=(CELL, LIMITS[place])) for seed in SEEDS]


# --- single steps and prefills -----------------------------------------------------------------------


def decode_s(form: str, batch: int, ranks: Sequence[int], context_tokens: int = 128) -> float:
    """Return the time of a decode step of so many requests, whose ranks repeat, each with its own adapter."""
    kernel_form = KernelForm(form)
    works = [SequenceWork(context_tokens, 1, True, number, ranks[number % len(ranks)]) for number in range(batch)]
    return CostModel(profile_of(SEVEN_B), kernel_form).step_s(step_work(works, kernel_form))


def cold_prefill_s(cell: Sequence[float], preset: str, rank: int, tokens: int) -> float:
    """Return the time to the first token of one cold request on an idle server."""
    engine = Engine(
        profile=profile_of(SEVEN_B),
        adapters=1,
        ranks=(rank,),
        modules=ASSISTED_MODULES,
        memory_bytes=MEMORY_BYTES,
        link_bytes_per_s=1e9 * cell[0],
    )
    (name,) = adapter_names(1)
    return float(run_engine(preset, engine, work_of([WorkloadRequest(0.0, name, tokens, 2)], [name], 1))["ttft_mean_s"])


def host_ms(cell: Sequence[float]) -> float:
    """Return the mean time, in milliseconds, that host cores prolong the cold prefill of a request of S3."""
    profile = profile_of(SEVEN_B)
    transfers = TransferModel(profile, profile.geometry.block_bytes(16), 1e9 * cell[0])
    costs = assist_costs(transfers, resolve_preset(OURS)[1])
    assert costs is not None
    (ref,) = synthetic_adapters(1, (SETTINGS["S3"].rank,), profile.geometry, modules=ASSISTED_MODULES)
    spent = []
    for each in lengths(REQUESTS, int(cell[1]), SEEDS[0]):
        course = costs.assisted(ref, each.input_tokens)
        layer_s = costs.host_layer_s(each.input_tokens, costs.rank(ref)) - costs.device_layer_s(each.input_tokens)
        spent.append(sum(place is ComputePlace.HOST for place in course.places) * layer_s)
    return 1e3 * float(np.mean(spent))
