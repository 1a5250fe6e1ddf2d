"""cluster.5: what deciding costs in a large cluster, on one core."""

import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from lorikeet.cluster.asked import Asked
from lorikeet.cluster.averages import Averages
from lorikeet.cluster.comigration.review import CoMigration
from lorikeet.cluster.comigration.state import CoMigrationSettings, Movable, ReplicaLoad
from lorikeet.cluster.demand import AdapterDemand
from lorikeet.cluster.entries import ReplicaInfo
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.operating_points import OperatingPoints
from lorikeet.cluster.placement.loraserve import LoRAServe
from lorikeet.cluster.routing import ROUTING
from lorikeet.cluster.routing.base import RoutingOptions
from lorikeet.cluster.routing.performance import PerformanceModel
from lorikeet.cluster.tables import RoutingTable, Share
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.memory.tree import block_keys
from lorikeet.rows import ROWS

RANKS = (8, 16, 32, 64, 128)
REPLICAS, ADAPTERS, LIVE, ROUTES, RESIDENT = 64, 10_000, 6_400, 1_000, 500
PROMPT_TOKENS, ANSWER_TOKENS, BLOCK_TOKENS, ADAPTER_BYTES = 512, 128, 16, 50_000_000
ROUTE_S, PLACE_S, SOLVE_S = 100e-6, 2.0, 1.0
PLACED_ADAPTERS, PLACED_REPLICAS, PLACEMENTS = 10_000, 1_000, 5
CHOSEN, MOVABLE, MOVABLE_ADAPTERS, PROBLEMS = 4, 128, 128, 9
_MODEL = PerformanceModel(KernelForm.PADDED, 1e-6, 1e-2)


@line(
    "cluster.5",
    title="A route, a placement and a co-migration in a large cluster, on one core",
    bound=f"a route ≤ {ROUTE_S * 1e6:.0f} µs at {REPLICAS} replicas and {ADAPTERS:,} adapters for every row; "
    f"LoRAServe's placement of {PLACED_ADAPTERS:,} adapters on {PLACED_REPLICAS:,} replicas ≤ {PLACE_S:g} s; a "
    f"co-migration of {MOVABLE} requests and {MOVABLE_ADAPTERS} adapters over {CHOSEN} replicas ≤ {SOLVE_S:g} s",
)
def run(runs: StoredRuns) -> Result:
    """Time each on a core of its own."""
    routes = {
        " by ".join(pair): runs.get("route-" + "-by-".join(pair).replace(":", "-"), partial(_routes, *pair))
        for pair in dict.fromkeys((row.routing, row.placement) for row in ROWS.values())
    }
    places = runs.get("place", _places)["seconds"]
    solved = runs.get("solve", _solves)
    medians = {name: statistics.median(each["seconds"]) for name, each in routes.items()}
    failures = [
        *(f"{name}: a route takes {seconds * 1e6:.0f} µs" for name, seconds in medians.items() if seconds > ROUTE_S),
        *([f"a placement takes {statistics.median(places):.2f} s"] if statistics.median(places) > PLACE_S else []),
        *([f"a co-migration takes {max(solved['seconds']):.2f} s"] if max(solved["seconds"]) > SOLVE_S else []),
    ]
    return Result(
        figure={
            **{
                f"{name}, µs": f"{seconds * 1e6:.1f} (P95 {np.quantile(routes[name]['seconds'], 0.95) * 1e6:.1f})"
                for name, seconds in medians.items()
            },
            "placement, s": statistics.median(places),
            "co-migration, s": statistics.median(solved["seconds"]),
            "slowest co-migration, s": max(solved["seconds"]),
            "co-migrations with moves": solved["moved"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"rows are told apart by routing and placement; medians of {ROUTES:,} routes with {LIVE:,} live requests "
        f"and {RESIDENT} adapters on each replica, {PROMPT_TOKENS}-token prompts whose keys are known (hashing them is "
        f"not counted); {PLACEMENTS} placements with drifting demand; {PROBLEMS} problems of random requests, both "
        "solver runs and the re-check included",
    )


# --- routes ------------------------------------------------------------------------------------------


def _routes(name: str, placement: str) -> dict[str, Any]:
    draw = random.Random(0)
    replicas = [ReplicaId(f"r{number}") for number in range(REPLICAS)]
    adapters = [AdapterDigest(f"a{number}") for number in range(ADAPTERS)]
    fleet = Fleet(Averages(float(ANSWER_TOKENS), 1.0))
    for replica in replicas:
        fleet.join(ReplicaInfo(replica, total_tokens=400_000, kv_token_bytes=5e5))
        for adapter in draw.sample(adapters, RESIDENT):
            fleet.loaded(replica, adapter)
    router = ROUTING[name](RoutingOptions(prefill=_MODEL, decode=_MODEL, slo_s=0.05))
    router.table = _table(placement, replicas, adapters, draw)
    live: list[tuple[ReplicaId, RequestId]] = []
    seconds = []
    with _one_core():
        for number in range(LIVE + ROUTES):
            asked = _asked(number, draw, adapters)
            began_s = time.perf_counter()
            chosen = router.route(asked, fleet, 0.0)
            took_s = time.perf_counter() - began_s
            if chosen is None:
                raise RuntimeError(f"{name} found no replica for request {number}")
            fleet.dispatched(asked, chosen)
            fleet.admitted(chosen, asked.request_id, 0.0)
            live.append((chosen, asked.request_id))
            if len(live) > LIVE:
                seconds.append(took_s)
                gone, request_id = live.pop(draw.randrange(len(live)))
                fleet.ended(gone, request_id, 1.0)
    return {"seconds": seconds}


def _table(
    placement: str, replicas: list[ReplicaId], adapters: list[AdapterDigest], draw: random.Random
) -> RoutingTable:
    """Return a table as a placement makes them: adapters everywhere, at one replica, or some of them at more."""
    everywhere = tuple(Share(replica, 1 / REPLICAS) for replica in replicas)
    if placement == "everywhere":
        return RoutingTable(1, dict.fromkeys(adapters, everywhere))
    counts = (1, 1, 1, 2, 4) if placement in ("loraserve", "loraserve:literal", "dlora") else (1,)
    homes = {adapter: draw.sample(replicas, draw.choice(counts)) for adapter in adapters}
    return RoutingTable(1, {each: tuple(Share(home, 1 / len(of)) for home in of) for each, of in homes.items()})


def _asked(number: int, draw: random.Random, adapters: list[AdapterDigest]) -> Asked:
    """A request whose prompt begins as some others do."""
    adapter = draw.choice(adapters)
    shared = [draw.randrange(4) for _ in range(4 * BLOCK_TOKENS)]
    prompt = shared + [draw.randrange(1000) for _ in range(PROMPT_TOKENS - len(shared))]
    keys = tuple(block_keys(adapter, prompt, BLOCK_TOKENS))
    rank = draw.choice(RANKS)
    return Asked(RequestId(str(number)), adapter, rank, ADAPTER_BYTES, PROMPT_TOKENS, ANSWER_TOKENS, keys)


# --- placements --------------------------------------------------------------------------------------


def _places() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    points = OperatingPoints({rank: 1000.0 / (1 + rank / 128) for rank in RANKS})
    placement = LoRAServe([ReplicaId(f"r{number}") for number in range(PLACED_REPLICAS)], points)
    loads = draw.pareto(1.5, PLACED_ADAPTERS) * 50
    seconds = []
    with _one_core():
        for period in range(PLACEMENTS + 1):
            loads = loads * draw.uniform(0.5, 1.5, PLACED_ADAPTERS)
            demands = [
                AdapterDemand(AdapterDigest(f"a{number:05}"), RANKS[number % len(RANKS)], 10**8, float(load))
                for number, load in enumerate(loads)
            ]
            began_s = time.perf_counter()
            placement.place(demands, float(period))
            seconds.append(time.perf_counter() - began_s)
    return {"seconds": seconds[1:]}  # the first moves nothing


# --- co-migrations -----------------------------------------------------------------------------------


def _solves() -> dict[str, Any]:
    seconds, moved = [], 0
    with _one_core():
        for seed in range(PROBLEMS):
            replicas, requests, sizes = _problem(seed)
            comigration = CoMigration(CoMigrationSettings(time_limit_s=SOLVE_S / 2))
            began_s = time.perf_counter()
            plan = comigration.review(replicas, requests, sizes)
            seconds.append(time.perf_counter() - began_s)
            moved += bool(plan.moves)
    return {"seconds": seconds, "moved": moved}


def _problem(seed: int) -> tuple[list[ReplicaLoad], list[Movable], dict[AdapterDigest, int]]:
    """One replica has most requests, and they wait."""
    draw = random.Random(seed)
    adapters = [AdapterDigest(f"a{number:03}") for number in range(MOVABLE_ADAPTERS)]
    replicas = [ReplicaId(f"r{number}") for number in range(CHOSEN)]
    mean_s = {adapter: draw.uniform(5, 20) for adapter in adapters}
    requests = []
    for number in range(MOVABLE):
        adapter = adapters[number % len(adapters)]
        home = replicas[0] if draw.random() < 0.6 else draw.choice(replicas)
        requests.append(
            Movable(
                RequestId(f"q{number}"),
                adapter,
                home,
                draw.randrange(50, 1500) * 2**20,
                mean_s[adapter],
                draw.uniform(0.05, 0.8),
            )
        )
    loads = [ReplicaLoad(replica, (16 if seed % 2 else 60) * 2**30, 0, 9.0) for replica in replicas]
    return loads, requests, dict.fromkeys(adapters, 56 * 2**20)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this process, and what it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
