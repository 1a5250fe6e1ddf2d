"""TOPPINGS' modelled figures: cold starts on one server, and its scheduler on its clusters."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import comb
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.papers.measure import (
    SEEDS,
    Figure,
    Measurement,
    Paper,
    Plot,
    Run,
    Series,
    Table,
    compared,
    computed,
    difference,
    increase,
    mean_of,
    most_of,
    reduction,
    times,
)
from benchmarks.papers.runs import Cluster, Engine, Figures, run_cluster, run_engine, work_of
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo
from lorikeet.costs.assist_costs import UNIT_MODULES
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.cold_prefill import assist_costs
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.prefill_pipeline import ComputePlace
from lorikeet.costs.profile import Constant, CostProfile, Curve
from lorikeet.costs.transfer_model import TransferModel
from lorikeet.papers.toppings.performance import PerformanceModel, fit_performance
from lorikeet.presets import resolve_preset
from lorikeet.workloads.arrivals import Rates, at_rate
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.synthetic import adapter_names, synthetic_adapters
from lorikeet.workloads.workload import WorkloadRequest

COMPOSED, SEVENTY_B, SEVEN_B = "a100-80-llama-2-7b@toppings", "a100-80x4-llama-2-70b@toppings", "printed"
"""The last is the first with steps as long as the paper prints them."""
FREE_HOST = "printed, host cores cost nothing"
OURS, CACHED, S_LORA, DLORA = "toppings", "cached", "toppings:s-lora", "dlora"
FEWER_CORES, ON_DEMAND, STRAWMAN = "toppings:fewer-cores", "toppings:on-demand", "toppings:strawman"
MEMORY_BYTES = 200 * 10**9
"""CACHED has unlimited memory (7.1). So do all systems here, because they do not differ in memory."""
MAX_RUNNING = 1_000
"""So many slots that no request waits for one."""
BLOCK_TOKENS = 1
"""LightLLM, on which all systems except dLoRA are built (7.1), allocates memory token by token.

In Llama-2-7B, a layer of an adapter of rank 64 takes the memory of 6 tokens. With blocks of 16 tokens, a layer would
arrive together with up to three others.
"""
PREFILL_S = {256: 0.044, 1000: 0.090}
PROMPT_QUANTILES = {1.281552: 256, 2.326348: 1000}
"""Prompts of 256 and 1,000 tokens are longer than 90 and 99 % of LMSYS-Chat-1M's (Fig. 4), by normal quantile."""
LONGEST_TOKENS = 2048
EINSUM_SHARE = 0.389
"""Time of dLoRA's kernel for mixed adapters, as a share of the base's computation (dLoRA, section 4.1)."""
REQUESTS, GRID_REQUESTS = 240, 150
"""Numbers of requests of a run, and of a run that finds the cell."""
QKV_SHARE = 6 / 8
"""Factor on ranks: profiles count an adapter on q, k, v and o, but adapters here are on q, k and v (7.1)."""
REPLICATED = 3.1
"""Bytes of an adapter on a rank of the 70B model, divided by a fourth of the adapter: every rank has the whole A
(section 6)."""


# --- the conditions that the paper leaves open ---------------------------------------------------------


LINKS_GB_S = (2, 3, 4, 6, 8)
"""A load takes "between a few to tens of milliseconds depending on the adapter size" (2.3), and ranks go to 256 (Table
2): with these links rank 64 takes 50 to 13 ms. An earlier grid also had 1, 12 and 16 GB/s."""
ANSWERS = ((50, 0.0), (100, 0.0), (215, 0.0), (215, 1.0), (215, 1.5), (215, 2.0))
"""Mean lengths, and the deviation of the logarithm: log-normal, or exponential without one.

215 is LMSYS-Chat-1M's mean (214.5, Zheng et al., 2024, table 1). It prints no other moment, so the deviations are ours.
"""
RATES = (3, 6, 9)
INTERRUPTED = {3: (13, 4), 6: (22, 10), 9: (29, 25)}
"""Mean share of serving time in percent, and median count, of on-demand loading by requests per second (section
2.3)."""


class Cell(NamedTuple):
    """A cell of the grid of open conditions. ``deviation`` is of the logarithm of answers, see :data:`ANSWERS`."""

    link_gb_s: float
    answer_tokens: int
    deviation: float = 0.0


CELLS = tuple(Cell(link, *answers) for link, answers in product(LINKS_GB_S, ANSWERS))


class Setting(NamedTuple):
    """A setting of the paper (Table 2 and 7.2): model, adapters, rank, requests/s, and distribution over adapters."""

    profile: str
    adapters: int
    rank: int
    rate: float
    choice: str = "round-robin"


SETTINGS = {
    "S3": Setting(SEVEN_B, 200, 64, 9.0),
    "S3, free host": Setting(FREE_HOST, 200, 64, 9.0),
    "S5": Setting(SEVENTY_B, 200, 32, 3.0),
    "S6": Setting(SEVENTY_B, 200, 64, 3.0),
    "MAF 128": Setting(SEVEN_B, 128, 64, 1.5, "functions"),
    "MAF 256": Setting(SEVEN_B, 256, 64, 3.6, "functions"),
    "MAF 512": Setting(SEVEN_B, 512, 64, 7.7, "functions"),
    **{f"{rate}/s": Setting(SEVEN_B, 512, 64, float(rate), "functions") for rate in RATES},
}
"""Settings by name; the last ones are those of section 2.3."""


def run_case(cell: Sequence[float], setting: str, preset: str, seed: int, requests: int = REQUESTS) -> Figures:
    """Return the figures of a preset in a setting; prefetched adapters are on the device at the start."""
    about = SETTINGS[setting]
    link_bytes_per_s = 1e9 * cell[0] / (REPLICATED if about.profile == SEVENTY_B else 1)
    profile = profile_of(about.profile)
    engine = Engine(
        profile=with_all_loaded(profile, about) if preset == DLORA else profile,
        adapters=about.adapters,
        ranks=(about.rank,),
        modules=UNIT_MODULES,
        memory_bytes=MEMORY_BYTES,
        link_bytes_per_s=link_bytes_per_s,
        max_num_seqs=MAX_RUNNING,
        block_size=BLOCK_TOKENS,
        settle=True,
    )
    # dLoRA loads all adapters before it begins (7.1).
    preset = f"{DLORA},prefetch=all" if preset == DLORA else preset
    rates, names = Rates.constant(about.rate), tuple(adapter_names(about.adapters))
    recipe = Recipe(
        lengths=lengths(requests, cell[1:], seed),
        rates=rates,
        count=requests,
        adapters=names,
        adapter_choice=about.choice,
        seed=seed,
    )
    work = work_of(at_rate(recipe.requests(), rates), names, seed)
    figures = run_engine(preset, engine, work, each_request)
    return {name: value for name, value in figures.items() if name != "ttft_s"}


def each_request(exchanges: Sequence[RequestResult]) -> Figures:
    """Return each request's serving time and suspended time, and the median number of interruptions.

    "Upon a request's arrival, the decoding phase (Dec) is preempted by prompt processing, which involves loading the
    requested LoRA adapter (Load) and prefilling (Pre). During this period, all the inflight requests are suspended,
    resulting in a decoding interruption" (2.2). A decoding request is suspended from its last token before the first
    token of another request until that first token. Each such request counts once: "the i-th arrival interrupts the
    decoding of the ongoing i - 1 requests" (2.3).
    """
    firsts_s = np.sort([each.token_times_s[0] for each in exchanges])
    suspended_s, counts = [], []
    for each in exchanges:
        times_s = np.array(each.token_times_s)
        others_s = firsts_s[(firsts_s > times_s[0]) & (firsts_s < times_s[-1])]
        before = np.searchsorted(times_s, others_s) - 1
        ends_s = dict(zip(before.tolist(), others_s.tolist(), strict=True))  # the last in each gap between tokens
        suspended_s.append(round(sum(end_s - times_s[gap] for gap, end_s in ends_s.items()), 5))
        counts.append(len(others_s))
    return {
        "e2e_s": [round(each.ended_s - each.due_s, 5) for each in exchanges],
        "suspended_s": suspended_s,
        "interruptions": float(np.median(counts)),
    }


def interrupted_share(made: Figures) -> float:
    """Return the mean share of serving time in which requests are suspended."""
    return float(np.mean(np.array(made["suspended_s"]) / made["e2e_s"]))


def delay_percent(made: Figures) -> float:
    """Return the mean percentage by which interruptions lengthen the serving time that a request has without them."""
    suspended_s = np.array(made["suspended_s"])
    return 100 * float(np.mean(suspended_s / (np.array(made["e2e_s"]) - suspended_s)))


def choose_cell(*made: Figures) -> Cell:
    """Return the cell whose figures of on-demand loading are nearest to the printed ones, by their mean log ratio."""
    return min(cells_by_distance(made))[1]


def load_s(cell: Cell) -> float:
    """Return the time to load an adapter of rank 64."""
    return adapter_bytes(64) / (1e9 * cell.link_gb_s)


def cells_by_distance(made: Sequence[Figures]) -> list[tuple[float, Cell]]:
    """Return each cell of the grid with its distance: the mean absolute logarithm of ours over the printed figures."""
    found = []
    for cell in CELLS:
        ours = [value for rate in RATES for value in interrupted_in(made, cell, rate)]
        printed = [value for rate in RATES for value in INTERRUPTED[rate]]
        ratios = np.maximum(np.array(ours) / np.array(printed), 0.01)
        found.append((float(np.abs(np.log(ratios)).mean()), cell))
    return found


def interrupted_in(made: Sequence[Figures], cell: Cell, rate: int) -> tuple[float, float]:
    """Return the share of interruptions in percent, and their median count, from the grid's results for a cell."""
    on_demand = made[GRID_KEYS.index((cell, rate))]
    return 100 * interrupted_share(on_demand), float(on_demand["interruptions"])


GRID_KEYS = tuple(product(CELLS, RATES))
GRID = tuple(Run(run_case, (tuple(cell), f"{rate}/s", ON_DEMAND, SEEDS[0], GRID_REQUESTS)) for cell, rate in GRID_KEYS)
CELL = Run(choose_cell, after=GRID)


def cases(setting: str, preset: str) -> list[Run]:
    """Return the runs of a preset in a setting, one per seed, in the chosen cell."""
    return [Run(run_case, (setting, preset, seed), after=(CELL,)) for seed in SEEDS]


# --- costs -------------------------------------------------------------------------------------------


@cache
def profile_of(name: str) -> CostProfile:
    """Return a profile by name, :data:`SEVEN_B` among them."""
    if name == FREE_HOST:
        profile, nothing = printed_steps(), Constant(0.0, "s", source="left out")
        assert profile.host_lora is not None
        free = msgspec.structs.replace(profile.host_lora, token=nothing, token_rank=nothing)
        return msgspec.structs.replace(profile, host_lora=free)
    return printed_steps() if name == SEVEN_B else load_profile(name)


def printed_steps() -> CostProfile:
    """Return the composed profile with steps on the line through the two prefills that the paper prints.

    These steps take three times as long as the device would need: 28 ms plus 62 us per token. Printed decodes agree:
    without adapters, the lines of Fig. 6 begin at 32 and 34 ms for a batch whose context is not printed.
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
    # dLoRA's share refers to the base's computation, so it applies to these steps.
    einsum = msgspec.structs.replace(
        profile.lora_costs(KernelForm.EINSUM),
        fixed=Constant(EINSUM_SHARE * once_s, "s", source=source),
        row=Constant(EINSUM_SHARE * token_s, "s/token", source=source),
    )
    return msgspec.structs.replace(profile, name=SEVEN_B, step=step, lora=profile.lora | {KernelForm.EINSUM: einsum})


def with_all_loaded(profile: CostProfile, setting: Setting) -> CostProfile:
    """Return a profile whose einsum reads all of a setting's adapters in each step.

    "We transform the LoRA type of each request into a one-hot vector" and multiply by einsum (dLoRA, section 6), so
    the product runs over all loaded types; dLoRA loads all adapters beforehand (7.1), and its overhead grows with the
    adapters in a server "due to its LoRA computation operator" (7.2). Memory is read as fast as KV is.
    """
    geometry, einsum = profile.geometry, profile.lora_costs(KernelForm.EINSUM)
    ranks = profile.tensor_parallel
    bytes_per_s = geometry.block_bytes(1) / ranks / profile.step.decode_attention.value
    own_bytes = adapter_bytes(setting.rank, profile) / ranks * (REPLICATED if ranks > 1 else 1)
    read_s = setting.adapters * own_bytes / bytes_per_s
    fixed = Constant(einsum.fixed.value + read_s, "s", source=f"{einsum.fixed.source}; all adapters are read")
    return msgspec.structs.replace(
        profile, lora=profile.lora | {KernelForm.EINSUM: msgspec.structs.replace(einsum, fixed=fixed)}
    )


def lengths(count: int, answers: Sequence[float], seed: int) -> tuple[WorkloadRequest, ...]:
    """Return requests whose prompts have the log-normal distribution with both printed quantiles.

    ``answers`` is one of :data:`ANSWERS`.
    """
    generator = np.random.default_rng(seed)
    (low, low_tokens), (high, high_tokens) = PROMPT_QUANTILES.items()
    sigma = np.log(high_tokens / low_tokens) / (high - low)
    prompts = generator.lognormal(np.log(low_tokens) - sigma * low, sigma, count)
    mean, deviation = answers
    made = (
        generator.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
        if deviation
        else generator.exponential(mean, count)
    )
    tokens = np.clip(np.rint(np.stack([prompts, made])), 1, LONGEST_TOKENS).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())


# --- performance models (section 5) ------------------------------------------------------------------


BATCHES, RANKS = (4, 8, 16, 32), (8, 16, 32, 64)
PROFILED_REQUESTS, R2 = 7_618, 0.96
PROFILING_SEED = 1_000
"""Not one of the evaluation's."""


def profiled(form: KernelForm, answers: Sequence[float], *, prefill: bool) -> PerformanceModel:
    """Return PrePerf or DecPerf, fitted to steps of mixed ranks and lengths that are as noisy as the printed R²."""
    generator, model = np.random.default_rng(PROFILING_SEED), CostModel(profile_of(SEVEN_B), form)
    drawn = lengths(PROFILED_REQUESTS, answers, PROFILING_SEED)
    steps: list[tuple[list[int], float]] = []
    begin: int = 0
    while begin + max(BATCHES) <= len(drawn):
        own = drawn[begin : begin + int(generator.choice(BATCHES))]
        ranks = generator.choice(RANKS, len(own)).tolist()
        works = [
            SequenceWork(0, each.input_tokens, True, number, QKV_SHARE * rank)
            if prefill
            else SequenceWork(each.input_tokens + each.output_tokens // 2, 1, True, number, QKV_SHARE * rank)
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
    """Return the value that equation 2 multiplies with its slope."""
    return sum(ranks) if form is KernelForm.UNPADDED else len(ranks) * max(ranks)


def determination(form: str) -> float:
    """Return R² of the models of decode steps that were profiled without noise."""
    kernel_form, generator = KernelForm(form), np.random.default_rng(PROFILING_SEED)
    model = CostModel(profile_of(SEVEN_B), kernel_form)
    steps: list[tuple[list[int], float]] = []
    for _ in range(PROFILED_REQUESTS // 15):
        size = int(generator.choice(BATCHES))
        ranks = generator.choice(RANKS, size).tolist()
        contexts = lengths(size, ANSWERS[1], int(generator.integers(2**31)))
        works = [
            SequenceWork(each.input_tokens + each.output_tokens // 2, 1, True, number, QKV_SHARE * rank)
            for number, (each, rank) in enumerate(zip(contexts, ranks, strict=True))
        ]
        steps.append((ranks, model.step_s(step_work(works, kernel_form))))
    fitted = fit_performance(kernel_form, steps)
    seconds = np.array([each for _, each in steps])
    predicted = np.array([fitted.slope_s * work_of_ranks(kernel_form, ranks) + fitted.fixed_s for ranks, _ in steps])
    return float(1 - np.var(seconds - predicted) / np.var(seconds))


# --- clusters (section 7.4) --------------------------------------------------------------------------


class Place(NamedTuple):
    """A cluster's servers, adapters, requests per second, distribution over adapters, and seconds of arrivals."""

    servers: int
    adapters: int
    rate: float
    choice: str
    window_s: float


SIMULATION = "simulation"
PLACES = {
    "30/s": Place(8, 200, 30.0, "uniform", 20.0),
    "40/s": Place(8, 200, 40.0, "uniform", 20.0),
    "50/s": Place(8, 200, 50.0, "uniform", 20.0),
    SIMULATION: Place(6, 4_000, 34.0, "functions", 15.0),
}
"""The testbed (Fig. 18), and a tenth of the simulated cluster of 60 servers and 40,000 functions (Fig. 19)."""
BY_DLORA, BY_CHANCE, FIRST_FIT = "toppings:dlora", "toppings:random", "toppings:first-fit"
SCHEDULERS = (OURS, BY_DLORA, BY_CHANCE, FIRST_FIT)
SLO_FACTOR, MAX_PACKED = 1.5, 64
"""Limit on TPT, as a multiple of the base model's TPT without LoRA. First fit packs fewer requests in a step (5)."""
READINGS = ("alone", "loaded")
"""Readings of the limit, which is 1.5 times a TPT of the base model: with one request at a time, or under the same
load."""
JUDGED_BY = READINGS[0]
"""The paper writes "1.5 x higher than that achieved by LLM inference without LoRA". Pages show both."""
UNPADDED = ",kernel_form=unpadded"


def limits_of(cell: Sequence[float], place: str) -> list[float]:
    """Return the limit on TPT in seconds for each reading."""
    about, answers = PLACES[place], cell[1:]
    return [SLO_FACTOR * _base_tpt_s(answers, rate) for rate in (0.05, about.rate / about.servers)]


def _base_tpt_s(answers: Sequence[float], rate: float) -> float:
    setting = Cluster(profile=profile_of(SEVEN_B), replicas=1, adapters=(), memory_bytes=MEMORY_BYTES)
    rates = Rates.constant(rate)
    recipe = Recipe(lengths=lengths(2_000, answers, SEEDS[0]), rates=rates, count=200, seed=SEEDS[0])
    return float(run_cluster(BY_CHANCE, setting, recipe.requests(), SEEDS[0])["tpt_mean_s"])


def run_place(
    cell: Sequence[float], limits_s: Sequence[float], place: str, preset: str, reading: str, seed: int
) -> Figures:
    """Return the figures of a preset at a place. An adapter's popularity does not depend on its rank.

    The preset schedules by the limit of ``reading``; the shares within both limits are counted.
    """
    about, profile, answers = PLACES[place], profile_of(SEVEN_B), cell[1:]
    form = resolve_preset(preset)[1].kernel_form
    setting = Cluster(
        profile=profile,
        replicas=about.servers,
        adapters=tuple(synthetic_adapters(about.adapters, RANKS, profile.geometry, modules=UNIT_MODULES)),
        slo=Slo(tpot_s=limits_s[READINGS.index(reading)]),
        limits_s=tuple(limits_s),
        link_bytes_per_s=1e9 * cell[0],
        memory_bytes=MEMORY_BYTES,
        block_size=BLOCK_TOKENS,
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
    """Return the runs of a preset at a place, one per seed. Only TOPPINGS' scheduler uses the limit."""
    reading = reading if preset.startswith(OURS) and ":" not in preset else READINGS[1]
    return [Run(run_place, (place, preset, reading, seed), after=(CELL, LIMITS[place])) for seed in SEEDS]


# --- single steps and prefills -----------------------------------------------------------------------


def decode_s(form: str, batch: int, ranks: Sequence[int], context_tokens: int = 128) -> float:
    """Return the time of a decode step of ``batch`` requests with different adapters, which cycle through the ranks."""
    kernel_form = KernelForm(form)
    works = [
        SequenceWork(context_tokens, 1, True, number, QKV_SHARE * ranks[number % len(ranks)]) for number in range(batch)
    ]
    return CostModel(profile_of(SEVEN_B), kernel_form).step_s(step_work(works, kernel_form))


def cold_prefill_s(cell: Sequence[float], preset: str, rank: int, tokens: int) -> float:
    """Return the time to the first token of one cold request on an idle server."""
    engine = Engine(
        profile=profile_of(SEVEN_B),
        adapters=1,
        ranks=(rank,),
        modules=UNIT_MODULES,
        memory_bytes=MEMORY_BYTES,
        link_bytes_per_s=1e9 * cell[0],
        block_size=BLOCK_TOKENS,
    )
    (name,) = adapter_names(1)
    return float(run_engine(preset, engine, work_of([WorkloadRequest(0.0, name, tokens, 2)], [name], 1))["ttft_mean_s"])


def host_ms(cell: Sequence[float]) -> float:
    """Return the mean time, in milliseconds, that a cold prefill of S3 spends on layers that host cores compute."""
    profile = profile_of(SEVEN_B)
    transfers = TransferModel(profile, profile.geometry.block_bytes(BLOCK_TOKENS), 1e9 * cell[0])
    costs = assist_costs(transfers, resolve_preset(OURS)[1])
    assert costs is not None
    (ref,) = synthetic_adapters(1, (SETTINGS["S3"].rank,), profile.geometry, modules=UNIT_MODULES)
    spent = []
    for each in lengths(REQUESTS, cell[1:], SEEDS[0]):
        course = costs.assisted(ref, each.input_tokens)
        layer_s = costs.times(each.input_tokens, costs.rank(ref)).host_s
        spent.append(sum(place is ComputePlace.HOST for place in course.places) * layer_s)
    return 1e3 * float(np.mean(spent))


# --- figures -----------------------------------------------------------------------------------------


TTFT, TPT, E2E = "ttft_mean_s", "tpt_mean_s", "e2e_mean_s"
MEANS = {"ttft": TTFT, "tpt": TPT, "e2e": E2E}


def over_cached(setting: str, preset: str) -> dict[str, Figure]:
    """Return the percentages by which a preset's TTFT, TPT and latency exceed CACHED's."""
    own, cached = cases(setting, preset), cases(setting, CACHED)
    return {name: compared(increase, own, cached, key) for name, key in MEANS.items()}


def of_settings(*parts: tuple[str, str, str, str]) -> dict[str, Figure]:
    """Return the figures of claims by (prefix of the claim, setting, preset, names of means)."""
    return {
        f"{prefix}-{name}": figure
        for prefix, setting, preset, wanted in parts
        for name, figure in over_cached(setting, preset).items()
        if name in wanted.split()
    }


def speedups(prefix: str, setting: str) -> dict[str, Figure]:
    """Return S-LoRA's means divided by TOPPINGS'."""
    theirs, own = cases(setting, S_LORA), cases(setting, OURS)
    return {f"{prefix}-{name}": compared(times, theirs, own, key) for name, key in MEANS.items()}


RIVALS = (
    ("S3", S_LORA),
    ("S3", DLORA),
    ("MAF 256", DLORA),
    ("MAF 512", S_LORA),
    ("S5", S_LORA),
    ("S5", DLORA),
    ("S6", S_LORA),
)
"""Settings and rivals over which claims of "up to" take the largest value."""


def at_most(change: Callable[[float, float], float], *, ours_first: bool = False) -> Figure:
    """Return the largest change of latency between TOPPINGS and a rival, over settings and rivals."""
    figures = []
    for setting, rival in RIVALS:
        own, theirs = cases(setting, OURS), cases(setting, rival)
        figures.append(compared(change, own, theirs, E2E) if ours_first else compared(change, theirs, own, E2E))
    return most_of(figures)


def within(made: Figures) -> float:
    """Return the share of requests within the limit by which claims are judged."""
    return float(made["within"][READINGS.index(JUDGED_BY)])


def attainment_gain(place: str) -> Figure:
    """Return the percentage points of requests that keep the limit with TOPPINGS' scheduler beyond dLoRA's."""
    return compared(difference, placed(place, OURS, JUDGED_BY), placed(place, BY_DLORA), within)


SHOWN = [
    (place, preset, reading)
    for place in ("30/s", "40/s", "50/s")
    for preset in SCHEDULERS
    for reading in (READINGS if preset == OURS else READINGS[1:])
    if place != "30/s" or preset in (OURS, BY_CHANCE)
]
SHOWN += [(SIMULATION, preset, READINGS[1]) for preset in SCHEDULERS]
SHOWN += [(SIMULATION, preset + UNPADDED, READINGS[1]) for preset in (OURS, BY_DLORA)]
"""Rows of the table of clusters: place, preset, and the reading that the preset uses."""


def attainment_rows(made: Sequence[Any]) -> list[list[Any]]:
    """Return attainment by both readings, and TPT, by place and scheduler."""
    rows, count = [], len(SEEDS)
    for number, shown in enumerate(SHOWN):
        own = made[number * count : (number + 1) * count]
        shares = [f"{100 * np.mean([each['within'][part] for each in own]):.1f}" for part in range(len(READINGS))]
        rows.append([*shown, *shares, f"{1e3 * np.mean([each[TPT] for each in own]):.1f}"])
    return rows


def grid_rows(made: Sequence[Any]) -> list[list[Any]]:
    """Return the whole grid, nearest cell first."""
    rows = []
    for distance, cell in sorted(cells_by_distance(made)):
        figures = ["{:.0f} %, {:.0f}".format(*interrupted_in(made, cell, rate)) for rate in RATES]
        rows.append([cell.link_gb_s, f"{1e3 * load_s(cell):.0f}", answer_words(cell), *figures, f"{distance:.2f}"])
    return rows


def answer_words(cell: Cell) -> str:
    """Return a cell's mean answer and its distribution, for pages."""
    return f"{cell.answer_tokens}, {f'log-normal {cell.deviation:g}' if cell.deviation else 'exponential'}"


def share_by_link(made: Sequence[Any]) -> list[Series]:
    """Return the share of interruptions at the highest rate by link, a line for each mean answer."""
    rate = RATES[-1]
    lines = [
        Series(
            f"answers of {answer_words(Cell(0, *answers))}",
            LINKS_GB_S,
            [interrupted_in(made, Cell(link, *answers), rate)[0] for link in LINKS_GB_S],
        )
        for answers in ANSWERS
    ]
    return [*lines, Series("printed", LINKS_GB_S, [INTERRUPTED[rate][0]] * len(LINKS_GB_S), printed=True)]


def adapter_bytes(rank: int, profile: CostProfile | None = None) -> int:
    """Return the bytes of an adapter on q, k and v; of Llama-2-7B without a profile."""
    geometry = (profile or profile_of(SEVEN_B)).geometry
    shapes = [geometry.modules[module] for module in UNIT_MODULES]
    return geometry.layers * sum(shape.in_features + shape.out_features for shape in shapes) * rank * 2


def gflop(tokens: int, rank: int) -> float:
    """Return the operations of one layer's q, k and v adapters in GFLOP."""
    return adapter_bytes(rank) / 2 / profile_of(SEVEN_B).geometry.layers * 2 * tokens / 1e9


def free_host_rows(made: Sequence[Any]) -> list[list[Any]]:
    """Return the means of CACHED, TOPPINGS, and TOPPINGS with a host that takes no time."""
    rows, cached = [], made[: len(SEEDS)]
    for number, name in enumerate((CACHED, OURS, f"{OURS}, free host")):
        own, row = made[number * len(SEEDS) : (number + 1) * len(SEEDS)], [name]
        for key in MEANS.values():
            value, base = (float(np.mean([each[key] for each in some])) for some in (own, cached))
            row += [f"{1e3 * value:.1f}", f"{increase(value, base):+.0f} %"]
        rows.append(row)
    return rows


LARGEST_BATCH = 64
"""Largest number that the paper names (2.3)."""


def heterogeneity() -> float:
    """Return the factor by which a batch takes longer if one request has rank 64 instead of 8."""
    one_large = decode_s(KernelForm.PADDED, LARGEST_BATCH, (64, *[8] * (LARGEST_BATCH - 1)))
    return one_large / decode_s(KernelForm.PADDED, LARGEST_BATCH, (8,))


def pipelined(rank: int, change: Callable[[float, float], float]) -> Figure:
    """Return the change of the cold prefill of 256 tokens by loading in groups."""
    runs = tuple(Run(cold_prefill_s, (preset, rank, 256), after=(CELL,)) for preset in ("toppings:one-group", OURS))
    return Figure(runs, lambda made: change(made[0], made[1]))


def interrupted(rate: int) -> dict[str, Figure]:
    """Return the figures of on-demand loading at a rate."""
    runs = cases(f"{rate}/s", ON_DEMAND)
    return {
        f"mot-interrupt-share-rps{rate}": mean_of(runs, lambda made: 100 * interrupted_share(made)),
        f"mot-interrupt-count-rps{rate}": mean_of(runs, "interruptions"),
    }


# --- the paper ---------------------------------------------------------------------------------------


SERVER = {
    "model, device": "Llama-2-7B on an A100 80 GB; S5 and S6: Llama-2-70B on four",
    "steps": "7B: on the line through the printed prefills of 256 and 1,000 tokens; 70B: composed from Vidur's tables",
    "LoRA": "BGMV and MBGMV with the slopes of Fig. 6; dLoRA's einsum 38.9 % of the base's computation, and a read of "
    "all loaded adapters (dLoRA, section 6: one-hot types)",
    "host cores": "the costs that 7.3's prefills of 64 and 256 tokens imply",
    "memory": "unlimited for all, as 7.1 has it for CACHED",
    "batching": "an arrival interrupts the decodes for a step of prompts (2.2)",
    "arrivals": f"Poisson, {REQUESTS} requests a run",
    "prompts": "log-normal, through the two printed quantiles of LMSYS-Chat-1M (256 and 1,000 tokens)",
    "answers, link": "the chosen cell of the grid below",
    "seeds": "five, the same for all presets",
}
INTERRUPTIONS = Measurement(
    "Interruptions by loading on demand",
    SERVER
    | {
        "adapters": "512 of rank 64, popular as Azure's functions",
        "load": "3, 6 and 9 requests/s",
        "interruption": "loads and prefills of others while a request decodes ('prompt processing, which involves "
        "loading the requested LoRA adapter (Load) and prefilling (Pre)', 2.2 and Fig. 2), as a share of its serving "
        "time; the count is of requests that begin while it decodes",
        "delay of token generation": "interruptions at 9/s over the serving time without them ('cumulatively delaying "
        "token generations by 49% on average in our experiments (§2.3)', section 1)",
        "grid": f"link {LINKS_GB_S} GB/s × answers (mean, deviation of the logarithm; 0: exponential) {ANSWERS}",
    },
    {
        **{claim: figure for rate in RATES for claim, figure in interrupted(rate).items()},
        "head-interrupt": mean_of(cases("9/s", ON_DEMAND), delay_percent),
    },
    plots=[
        Plot(
            f"Share of serving time lost to loads at {RATES[-1]} requests/s",
            "link, GB/s",
            "share of serving time, %",
            GRID,
            share_by_link,
        )
    ],
    tables=[
        Table(
            "The whole grid, nearest cell first: mean share of serving time and median count of interruptions; the "
            "distance is the mean absolute logarithm of ours over the printed figures",
            ["link, GB/s", "load of rank 64, ms", "answer, tokens", *(f"{rate}/s" for rate in RATES), "distance"],
            GRID,
            grid_rows,
        )
    ],
)
SYNTHETIC = Measurement(
    "Synthetic settings",
    SERVER | {"adapters": "200, each request another one: always cold", "load": "S3: 9/s; S5, S6: 3/s"},
    {
        **of_settings(
            ("s3-toppings", "S3", OURS, "ttft tpt e2e"),
            ("s3-s-lora", "S3", S_LORA, "ttft tpt e2e"),
            ("s3-dlora", "S3", DLORA, "ttft tpt e2e"),
            ("s3-toppings-lowcpu", "S3", FEWER_CORES, "ttft tpt e2e"),
            ("s5-s-lora", "S5", S_LORA, "ttft tpt e2e"),
            ("s5-dlora", "S5", DLORA, "ttft tpt e2e"),
            ("s5-toppings", "S5", OURS, "ttft tpt e2e"),
        ),
        **speedups("s6-toppings-vs-s-lora", "S6"),
        "head-latency-max": at_most(times),
        "head-latency-avg": compared(times, cases("S3", S_LORA), cases("S3", OURS), E2E),
        "head-latency-reduction": at_most(reduction, ours_first=True),
        "head-ideal-overhead": over_cached("S3", OURS)["e2e"],
        "mot-strawman-ttft": compared(times, cases("S3", STRAWMAN), cases("S3", CACHED), TTFT),
        "mot-strawman-tpt": compared(times, cases("S3", STRAWMAN), cases("S3", CACHED), TPT),
        "s3-toppings-cpu-time": Figure((Run(host_ms, after=(CELL,)),), lambda made: float(made[0])),
    },
    tables=[
        Table(
            "What the host's computing costs in S3: means without it, and over CACHED's",
            ["preset", "TTFT, ms", "more", "TPT, ms", "more", "latency, ms", "more"],
            (*cases("S3", CACHED), *cases("S3", OURS), *cases("S3, free host", OURS)),
            free_host_rows,
        )
    ],
)
PRODUCTION = Measurement(
    "Scaled production workload",
    SERVER | {"adapters": "128, 256, 512 of rank 64, popular as Azure's functions", "load": "1.5, 3.6, 7.7 requests/s"},
    {
        **of_settings(
            ("maf128-s-lora", "MAF 128", S_LORA, "ttft tpt e2e"),
            ("maf128-dlora", "MAF 128", DLORA, "tpt e2e"),
            ("maf128-toppings", "MAF 128", OURS, "ttft"),
            ("maf256-dlora", "MAF 256", DLORA, "tpt e2e"),
            ("maf512-s-lora", "MAF 512", S_LORA, "tpt e2e"),
        ),
        **speedups("maf512-toppings-vs-s-lora", "MAF 512"),
    },
)
SCHEDULING = Measurement(
    "Scheduling in clusters",
    {
        "servers": "8 of TOPPINGS' servers; simulation: 6 at 34/s with 4,000 functions, a tenth of 60 at 340/s "
        "with 40,000",
        "adapters": "200 of ranks 8, 16, 32, 64 on q, k and v, equally popular; simulation: as Azure's functions",
        "models": f"PrePerf and DecPerf fitted to {PROFILED_REQUESTS:,} requests in batches of {BATCHES} and ranks "
        f"{RANKS}, with noise for an R² of {R2}, of another seed than the runs",
        "limit on TPT": "1.5 × the base model's with one request at a time; the table has the other reading, 1.5 × "
        "the base model's under the same load, by which no scheduler loses much",
        "first fit": f"packs fewer than {MAX_PACKED} requests in a step",
        "window": "20 s of arrivals, simulation 15 s; the first fourth does not count",
        "seeds": "five, the same for all schedulers",
    },
    {
        "cluster-slo-rps40": attainment_gain("40/s"),
        "cluster-slo-rps50": attainment_gain("50/s"),
        "head-slo": mean_of(placed("30/s", OURS, JUDGED_BY), lambda made: 100 * within(made)),
        **{
            claim: compared(reduction, placed(SIMULATION, OURS), placed(SIMULATION, rival), TPT)
            for claim, rival in (
                ("sim-tpt-vs-dlora", BY_DLORA),
                ("sim-tpt-vs-random", BY_CHANCE),
                ("sim-tpt-vs-firstfit", FIRST_FIT),
                ("head-tpt", FIRST_FIT),
            )
        },
    },
    tables=[
        Table(
            "Requests within the limit, by both readings, and mean TPT; with MBGMV last",
            ["place", "scheduler", "schedules by", "within, alone, %", "within, loaded, %", "TPT, ms"],
            tuple(run for shown in SHOWN for run in placed(*shown)),
            attainment_rows,
        )
    ],
)
SINGLE = Measurement(
    "Single steps and prefills",
    {
        "model, device": "Llama-2-7B on an A100 80 GB, printed steps",
        "decode": "contexts of 128 tokens, each request its own adapter",
        "heterogeneity": f"a batch of {LARGEST_BATCH}: one request of rank 64 and the others of 8, beside all of 8",
        "cold prefill": "one prompt of 256 tokens on an idle server, in groups of layers beside one group",
        "R²": f"of decode steps of mixed ranks and contexts, {PROFILED_REQUESTS:,} requests, without noise",
    },
    {
        "toy-bgmv-i1": computed(lambda: 1e3 * decode_s(KernelForm.PADDED, 24, (32,))),
        "toy-bgmv-i2": computed(lambda: 1e3 * decode_s(KernelForm.PADDED, 16, (64,))),
        "toy-mbgmv-i1": computed(lambda: 1e3 * decode_s(KernelForm.UNPADDED, 24, (32,))),
        "toy-mbgmv-i2": computed(lambda: 1e3 * decode_s(KernelForm.UNPADDED, 16, (64,))),
        "head-heterogeneity": computed(heterogeneity),
        "mot-heterogeneity-28": computed(lambda: increase(heterogeneity(), 1.0)),
        "model-r2-bgmv": computed(lambda: determination(KernelForm.PADDED)),
        "model-r2-mbgmv": computed(lambda: determination(KernelForm.UNPADDED)),
        "micro-pipeline-r128": pipelined(128, times),
        "micro-pipeline-r64": pipelined(64, times),
        "design-pipeline": pipelined(128, lambda whole, grouped: reduction(grouped, whole)),
        "mot-prefill-256": computed(lambda: 1e3 * PREFILL_S[256]),
        "mot-prefill-1000": computed(lambda: 1e3 * PREFILL_S[1000]),
        "mot-adapter-size": computed(lambda: adapter_bytes(64) / 2**20),
        "mot-adapter-kv-tokens": computed(lambda: adapter_bytes(64) / profile_of(SEVEN_B).geometry.block_bytes(1)),
        "mot-combinations": computed(lambda: float(sum(comb(4 + size, size) for size in range(1, 65)))),
        "head-lora-load": computed(lambda: gflop(256, 64)),
    },
)
PAPER = Paper(
    measurements=[INTERRUPTIONS, SYNTHETIC, PRODUCTION, SCHEDULING, SINGLE],
)
