"""TOPPINGS' settings, modelled: cold starts on one server, and its scheduler on its clusters.

"TOPPINGS: CPU-Assisted, Rank-Aware Adapter Serving for LLM Inference". Numbers beside ours are those of the text.
Adapters are as TOPPINGS prints them where it does, with a host that adds what it prints. On its engine a step takes
about three times what the device needs: steps of the 7B model lie on the line through its prefills of 256 and 1,000
tokens (44 and 90 ms, Fig. 4). It prints neither its link nor how long a load takes: cold starts take 29 % of its
serving time at 9 requests/s of rank 64 (2.3), so the link has 3.1 GB/s if every request has one.
"""

from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.harness import print_table
from benchmarks.papers.dlora import ADAPTER_SHARE
from benchmarks.papers.runs import (
    Cluster,
    Engine,
    Figures,
    Options,
    Runs,
    main,
    mean_of,
    more,
    ms,
    printed,
    run_cluster,
    run_engine,
    work_of,
)
from lorikeet.bench.arrivals import Rates, at_rate
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.assist_costs import ASSISTED_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import Constant, CostProfile, Curve

COMPOSED, SEVENTY_B, SEVEN_B = "a100-80-llama-2-7b@toppings", "a100-80x4-llama-2-70b@toppings", "printed"
"""The last is the first with steps as long as the paper prints them."""
OURS, CACHED, DLORA = "toppings", "cached", "dlora"
PRESETS = (CACHED, OURS, "toppings:on-demand", "toppings:strawman", "toppings:s-lora", DLORA)
ABLATIONS = ("toppings:auto", "toppings:one-group", "toppings:static", "toppings:fewer-cores")
MEMORY_BYTES = 200 * 10**9
"""CACHED has unlimited memory (7.1). So have all here: it is not what they differ by."""
MAX_RUNNING = 1_000
"""Nothing waits for a slot."""
PREFILL_S = {256: 0.044, 1000: 0.090}
LINK_BYTES_PER_S = 96 * 2**20 * 9 / 0.29
PROMPT_QUANTILES = {1.281552: 256, 2.326348: 1000}
"""Prompts of 256 and 1,000 tokens are longer than 90 and 99 % of LMSYS-Chat-1M's (Fig. 4), by normal quantile."""
ANSWER_MEAN, LONGEST, SEED = 215, 2048, 7
"""Answers are of exponential length; the paper does not print any."""


class Setting(NamedTuple):
    """One of the paper's (Table 2 and 7.2): model, adapters and their rank, requests per second, and their choice."""

    profile: str
    adapters: int
    rank: int
    rate: float
    choice: str = "round-robin"


SETTINGS = {
    "S1": Setting(SEVEN_B, 200, 32, 9.0),
    "S2": Setting(SEVEN_B, 200, 64, 6.0),
    "S3": Setting(SEVEN_B, 200, 64, 9.0),
    "S3 composed": Setting(COMPOSED, 200, 64, 9.0),
    "S5": Setting(SEVENTY_B, 200, 32, 3.0),
    "S6": Setting(SEVENTY_B, 200, 64, 3.0),
    "MAF 128": Setting(SEVEN_B, 128, 64, 1.5, "functions"),
    "MAF 256": Setting(SEVEN_B, 256, 64, 3.6, "functions"),
    "MAF 512": Setting(SEVEN_B, 512, 64, 7.7, "functions"),
}

Increase = tuple[float | None, float | None, float | None]
INCREASES: dict[tuple[str, str], Increase] = {
    ("MAF 128", "toppings"): (0.09, None, None),
    ("MAF 128", "toppings:s-lora"): (0.43, 0.07, 0.05),
    ("MAF 128", "dlora"): (None, 0.29, 0.29),
    ("MAF 256", "dlora"): (None, 0.86, 0.90),
    ("MAF 512", "toppings:s-lora"): (None, 0.43, 0.43),
    ("S3", "toppings"): (0.06, 0.06, 0.07),
    ("S3", "toppings:s-lora"): (0.82, 0.80, 0.81),
    ("S3", "dlora"): (0.29, 0.58, 0.57),
    ("S3", "toppings:fewer-cores"): (0.17, 0.11, 0.10),
    ("S5", "toppings"): (0.24, 0.30, 0.33),
    ("S5", "toppings:s-lora"): (0.65, 0.65, 0.61),
    ("S5", "dlora"): (0.18, 0.59, 0.61),
}
"""How much longer TTFT, TPT (latency per output token) and latency are than CACHED's (7.2, Figs. 13, 14 and 16)."""
MEANS = ("ttft_mean_s", "tpt_mean_s", "e2e_mean_s")


class Place(NamedTuple):
    """Servers of a cluster, their adapters, requests per second, and the choice of adapters."""

    servers: int
    adapters: int
    rate: float
    choice: str


SIMULATION = "simulation"
PLACES = {
    "30/s": Place(8, 200, 30.0, "uniform"),
    "40/s": Place(8, 200, 40.0, "uniform"),
    "50/s": Place(8, 200, 50.0, "uniform"),
    SIMULATION: Place(15, 10_000, 85.0, "functions"),
}
"""The testbed (Fig. 18), and a quarter of the simulated cluster of 60 servers and 40,000 functions (Fig. 19)."""
SCHEDULERS = (OURS, "toppings:dlora", "toppings:random", "toppings:first-fit", "toppings:empty-free")
GAINS = {"40/s": 0.21, "50/s": 0.26}
"""By which the share within the limit is larger than under dLoRA's scheduler (7.4); read as points."""
TPT_LESS = {"toppings:dlora": 0.22, "toppings:random": 0.23, "toppings:first-fit": 0.57}
"""By which the mean TPT is less than that of each in the simulation (7.4)."""
CLUSTER_RANKS, SLO_FACTOR, MAX_PACKED, SEEDS = (8, 16, 32, 64), 1.5, 64, (1, 2)
"""Of the limit on TPT: times what the base model reaches without LoRA. First fit packs fewer in a step (5)."""


def run(runs: Runs, options: Options) -> None:
    """Run all and print the tables."""
    count = 400 if options.quick else 2_000
    settings = ["S3", "S5", "MAF 128"] if options.quick else list(SETTINGS)
    cases = [(setting, preset, LINK_BYTES_PER_S) for setting, preset in product(settings, PRESETS)]
    ablations = [("S3", preset, LINK_BYTES_PER_S) for preset in ABLATIONS]
    sheet = [("S3", preset, 0.0) for preset in (*PRESETS, *ABLATIONS)]
    found = runs.all(
        {f"{each[0]}-{each[1]}-{each[2]:.0f}": (run_case, *each, count) for each in (*cases, *ablations, *sheet)}
    )
    for title, shown in (("Cold starts on one server", cases), ("Ablations", ablations), ("PCI Express 4.0", sheet)):
        rows = []
        for setting, preset, link in shown:
            own, cached = (found[f"{setting}-{each}-{link:.0f}"] for each in (preset, CACHED))
            row = [setting, preset]
            for mean, paper in zip(MEANS, INCREASES.get((setting, preset), (None,) * 3), strict=True):
                row += [ms(own[mean]), "" if preset == CACHED else more(own[mean], cached[mean])]
                row.append(printed(paper if link else None))
            rows.append(row)
        columns = [word for mean in ("TTFT, ms", "TPT, ms", "latency, ms") for word in (mean, "more", "paper")]
        print_table(f"{title}, means over {CACHED}'s", ["setting", "preset", *columns], rows)
    cluster(runs, options)


def cluster(runs: Runs, options: Options) -> None:
    """Print attainment and latency per token by scheduler."""
    duration_s, seeds = (30.0, SEEDS[:1]) if options.quick else (60.0, SEEDS)
    places = ["40/s"] if options.quick else list(PLACES)
    limits = runs.all({f"limit-{place}": (limit_of, place, duration_s) for place in places})
    made = runs.all(
        {
            f"cluster-{place}-{preset}-{seed}": (run_place, place, preset, limits[f"limit-{place}"], seed, duration_s)
            for place, preset, seed in product(places, SCHEDULERS, seeds)
        }
    )
    rows = []
    for place, preset in product(places, SCHEDULERS):
        own, ours = ([made[f"cluster-{place}-{each}-{seed}"] for seed in seeds] for each in (preset, OURS))
        within, best = (float(np.mean([each["within"][0] for each in some])) for some in (own, ours))
        gain = "" if preset == OURS else f"{best - within:+.1%}"
        paper = printed(GAINS.get(place) if preset == "toppings:dlora" else None)
        tpt, mine = mean_of(own, "tpt_mean_s"), mean_of(ours, "tpt_mean_s")
        less_by = printed(TPT_LESS.get(preset) if place == SIMULATION else None, ".0%")
        rows.append([place, preset, f"{within:.1%}", gain, paper, ms(tpt), f"{1 - mine / tpt:.0%}", less_by])
    headings = ["place", "preset", "within the limit", "toppings more by", "paper", "TPT, ms", "toppings less", "paper"]
    print_table("Schedulers of a cluster", headings, rows)


# --- one server --------------------------------------------------------------------------------------


def run_case(setting: str, preset: str, link_bytes_per_s: float, requests: int) -> Figures:
    """Return the figures of a preset in a setting; what it prefetches is there at first."""
    about = SETTINGS[setting]
    engine = Engine(
        profile=printed_steps() if about.profile == SEVEN_B else load_profile(about.profile),
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
        lengths=lengths(requests, SEED),
        rates=rates,
        count=requests,
        adapters=names,
        adapter_choice=about.choice,
        seed=SEED,
    )
    return run_engine(preset, engine, work_of(at_rate(recipe.requests(), rates), names, SEED))


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
        fixed=Constant(ADAPTER_SHARE * once_s, "s", source=source),
        row=Constant(ADAPTER_SHARE * token_s, "s/token", source=source),
    )
    return msgspec.structs.replace(profile, name=SEVEN_B, step=step, lora=profile.lora | {KernelForm.EINSUM: einsum})


def lengths(count: int, seed: int) -> tuple[WorkloadRequest, ...]:
    """Return requests with prompts of the log-normal distribution that has both printed quantiles."""
    generator = np.random.default_rng(seed)
    (low, low_tokens), (high, high_tokens) = PROMPT_QUANTILES.items()
    sigma = np.log(high_tokens / low_tokens) / (high - low)
    prompts = generator.lognormal(np.log(low_tokens) - sigma * low, sigma, count)
    answers = generator.exponential(ANSWER_MEAN, count)
    tokens = np.clip(np.rint(np.stack([prompts, answers])), 1, LONGEST).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())


# --- clusters ----------------------------------------------------------------------------------------


def limit_of(place: str, duration_s: float) -> float:
    """Return the limit on TPT in seconds: of the base model on one server under the place's load, and half more."""
    about = PLACES[place]
    setting = Cluster(
        profile=printed_steps(), replicas=1, adapters=(), memory_bytes=MEMORY_BYTES, since_s=duration_s / 4
    )
    rates = Rates.constant(about.rate / about.servers)
    recipe = Recipe(lengths=lengths(2_000, SEEDS[0]), rates=rates, duration_s=4 * duration_s, seed=SEEDS[0])
    return SLO_FACTOR * float(run_cluster("toppings:random", setting, recipe.requests(), SEEDS[0])["tpt_mean_s"])


def run_place(place: str, preset: str, limit_s: float, seed: int, duration_s: float) -> Figures:
    """Return the figures of a preset at a place. How popular an adapter is has nothing to do with its rank."""
    about, profile = PLACES[place], printed_steps()
    setting = Cluster(
        profile=profile,
        replicas=about.servers,
        adapters=tuple(synthetic_adapters(about.adapters, CLUSTER_RANKS, profile.geometry, modules=ASSISTED_MODULES)),
        slo=Slo(tpot_s=limit_s),
        limits_s=(limit_s,),
        link_bytes_per_s=LINK_BYTES_PER_S,
        memory_bytes=MEMORY_BYTES,
        max_num_seqs=MAX_PACKED if preset == "toppings:first-fit" else 256,
        since_s=duration_s / 4,
    )
    requests = Recipe(
        lengths=lengths(2_000, seed),
        rates=Rates.constant(about.rate),
        duration_s=duration_s,
        adapters=tuple(np.random.default_rng(seed).permutation(adapter_names(about.adapters)).tolist()),
        adapter_choice=about.choice,
        seed=seed,
    ).requests()
    return run_cluster(preset, setting, requests, seed)


if __name__ == "__main__":
    main(__doc__ or "", "toppings", run)
