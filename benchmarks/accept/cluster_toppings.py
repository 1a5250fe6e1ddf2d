"""TOPPINGS' part of cluster.3: its scheduler and its rivals on its own modelled servers."""

from collections.abc import Mapping
from concurrent.futures import Executor
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.accept import toppings_cases as server
from benchmarks.accept.admission_common import part_name
from benchmarks.accept.cluster_runs import ClusterSetting, mean_of, run_cluster
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.slo import Slo
from lorikeet.scheduling.coldstart.costs import ASSISTED_MODULES

OURS, DLORA, RANDOM, FIRST_FIT = "toppings", "toppings:dlora", "toppings:random", "toppings:first-fit"
ROWS = (OURS, DLORA, RANDOM, FIRST_FIT)
OTHER_READING = "toppings:empty-free"
"""Equation 2 read so that the first of a queue is charged for all of a prefill; judged by nobody."""
RANKS = (8, 16, 32, 64)
"""Four, which the paper does not print; those of its performance models."""
SLO_FACTOR = 1.5
"""The limit on TPT over what the base model reaches without LoRA (7.4)."""
DURATION_S, SINCE_S = 60.0, 15.0
"""Of a run; what arrives in the first seconds finds servers that are not busy yet, and does not count."""
MAX_RUNNING = 256
"""Requests in a step. The paper prints no bound for servers."""
MAX_PACKED = 64
"""The same where servers are filled one after the other, by first fit: the most requests of a step that the paper
counts with (5)."""
SEEDS = (1, 2)
_ALONE_PER_S, _ALONE_S = 0.05, 2000.0


class Place(NamedTuple):
    """Servers and what is asked of them.

    Attributes:
        servers, adapters: how many.
        rate: requests per second, Poisson.
        choice: of adapters.
    """

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
"""The testbed (Fig. 18) and a quarter of the simulated cluster of 60 servers, 40,000 functions and 340 requests/s
(Fig. 19). The testbed's adapters are not printed."""

Found = Mapping[str, Any]


class Case(NamedTuple):
    """A run: a row at a place."""

    place: str
    row: str
    seed: int

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return part_name(f"toppings-{self.place.replace('/', '-')}-{self.row}-{self.seed}")


def measure(runs: StoredRuns, pool: Executor) -> dict[str, Any]:
    """Return the limits on TPT, and all runs.

    Returns:
        ``limits``: by place, of the base model on idle servers and under the place's load. ``runs``: by place and row,
        one for each seed.
    """
    made = {place: pool.submit(stored_limits, runs, place) for place in PLACES}
    limits = {place: each.result() for place, each in made.items()}
    rows = (*ROWS, OTHER_READING)
    waiting = {
        (place, row): [pool.submit(stored_case, runs, limits[place], Case(place, row, seed)) for seed in SEEDS]
        for place, row in product(PLACES, rows)
    }
    return {
        "limits": limits,
        "runs": {place: {row: [each.result() for each in waiting[place, row]] for row in rows} for place in PLACES},
    }


def stored_limits(runs: StoredRuns, place: str) -> dict[str, float]:
    """Find a place's limits on TPT, and keep them."""
    return runs.get(part_name(f"toppings-limits-{place.replace('/', '-')}"), lambda: limits_of(place))


def limits_of(place: str, duration_s: float = DURATION_S) -> dict[str, float]:
    """Return the limits on TPT in seconds: the base model's on an idle server, and under the place's load on one."""
    about = PLACES[place]
    alone = base_tpt_s(_ALONE_PER_S, _ALONE_S * duration_s / DURATION_S, 0.0)
    loaded = base_tpt_s(about.rate / about.servers, 4 * duration_s, SINCE_S * duration_s / DURATION_S)
    return {"idle": SLO_FACTOR * alone, "loaded": SLO_FACTOR * loaded}


def base_tpt_s(rate: float, duration_s: float, since_s: float) -> float:
    """Return the mean TPT of one server without adapters."""
    setting = ClusterSetting(
        profile=server.printed_steps(),
        replicas=1,
        adapters=(),
        memory_bytes=server.MEMORY_BYTES,
        max_running=MAX_RUNNING,
        since_s=since_s,
    )
    recipe = Recipe(lengths=lengths(SEEDS[0]), rates=Rates.constant(rate), duration_s=duration_s, seed=SEEDS[0])
    return float(run_cluster(RANDOM, setting, recipe.requests(), SEEDS[0])["tpt_mean_s"])


def stored_case(runs: StoredRuns, limits: Mapping[str, float], case: Case) -> dict[str, Any]:
    """Run a case, and keep it even if another one fails."""
    return runs.get(case.name, lambda: run_case(limits, case))


def run_case(limits: Mapping[str, float], case: Case, duration_s: float = DURATION_S) -> dict[str, Any]:
    """Return the figures of a case; policies are to keep the limit of loaded servers."""
    about, profile = PLACES[case.place], server.printed_steps()
    setting = ClusterSetting(
        profile=profile,
        replicas=about.servers,
        adapters=tuple(synthetic_adapters(about.adapters, RANKS, profile.geometry, modules=ASSISTED_MODULES)),
        slo=Slo(tpot_s=limits["loaded"]),
        limits_s=(limits["idle"], limits["loaded"]),
        link_bytes_per_s=server.LINK_BYTES_PER_S,
        memory_bytes=server.MEMORY_BYTES,
        max_running=MAX_PACKED if case.row == FIRST_FIT else MAX_RUNNING,
        since_s=SINCE_S * duration_s / DURATION_S,
    )
    return run_cluster(case.row, setting, requests_of(case, duration_s), case.seed)


def requests_of(case: Case, duration_s: float) -> list[WorkloadRequest]:
    """Return the requests of a case. Who is how popular has nothing to do with ranks."""
    about = PLACES[case.place]
    names = np.random.default_rng(case.seed).permutation(adapter_names(about.adapters)).tolist()
    return Recipe(
        lengths=lengths(case.seed),
        rates=Rates.constant(about.rate),
        duration_s=duration_s,
        adapters=tuple(names),
        adapter_choice=about.choice,
        seed=case.seed,
    ).requests()


def lengths(seed: int) -> tuple[WorkloadRequest, ...]:
    """Return lengths like LMSYS-Chat-1M's, as for one server."""
    return server.lengths(server.REQUESTS, np.random.default_rng(seed))


def attained(found: Found, place: str, row: str, limit: str) -> float:
    """Return the share of requests that keep a limit, over all seeds."""
    position = ("idle", "loaded").index(limit)
    return float(np.mean([each["within"][position] for each in found["runs"][place][row]]))


def out_of_order(found: Found) -> list[str]:
    """Return where the systems do not come in the order that the paper prints, in words."""
    wrong = []
    for place, row in product(PLACES, ROWS[1:]):
        mine, theirs, other = (attained(found, place, each, "loaded") for each in (OURS, row, OTHER_READING))
        if theirs > mine:
            said = f"{place}: {theirs:.1%} of {row}'s requests keep the limit, {mine:.1%} of {OURS}'s"
            wrong.append(f"{said} ({other:.1%} of {OTHER_READING}'s)")
    tpt_s = [mean_of(found["runs"][SIMULATION][row], "tpt_mean_s") for row in ROWS]
    if tpt_s != sorted(tpt_s):
        said = ", ".join(f"{row} {1e3 * each:.1f} ms" for row, each in zip(ROWS, tpt_s, strict=True))
        wrong.append(f"{SIMULATION}: mean TPT of {said}")
    return wrong
