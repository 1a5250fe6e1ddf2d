"""dLoRA's part of cluster.3: its systems on half of the cluster of its largest model."""

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

from benchmarks.accept import dlora_cases as server
from benchmarks.accept import dlora_figures as paper
from benchmarks.accept.admission_common import part_name
from benchmarks.accept.cluster_runs import ClusterSetting, highest, ladder, mean_of, run_cluster
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.arrivals import at_rate
from lorikeet.bench.function_trace import popularity
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.bench.synthetic import adapter_names, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work

PROFILE = "a100-80x4-llama-2-70b"
REPLICAS, ADAPTERS = 4, 16
"""Half of the paper's 8 replicas on 32 devices and 32 adapters (7.2)."""
OURS, PROACTIVE, ROUND_ROBIN, PEFT, VLLM = "dlora", "dlora:proactive", "dlora:rr", "dlora:peft", "dlora:vllm-uniform"
ROWS = (OURS, PROACTIVE, ROUND_ROBIN, PEFT, VLLM)
SEARCHED = (OURS, PEFT, VLLM)
"""Whose highest rate the paper compares; the others are those of 7.4."""
SKEW = 1
"""Functions that follow one another to the same adapter: the least skew, since none is printed."""
DURATION_S = 100.0
"""Of the arrivals. Longer ones take long to simulate under more than the replicas bear."""
RATES = tuple(ladder(1.5, 1.2, 25))
"""Requests per second that are tried, 1.5 to 119: an answer is good to 20 %."""
SEEDS = (7, 8, 9, 10)

Found = Mapping[str, Any]


class Case(NamedTuple):
    """A run: a row at a rate."""

    row: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return part_name(f"dlora-{self.row}-{self.rate:.2f}-{self.seed}")


def measure(runs: StoredRuns, pool: Executor) -> dict[str, Any]:
    """Return the highest rate of each row that is searched, and all rows' runs at that of ``OURS``.

    Returns:
        ``peaks``: by row; 0 where no rate keeps the limit. ``runs``: by row, one for each seed.
    """
    waiting = {row: pool.submit(peak, runs, row) for row in SEARCHED}
    peaks = {row: waiting[row].result() for row in SEARCHED}
    rate = peaks[OURS] or RATES[0]
    made = {row: [pool.submit(stored_case, runs, Case(row, rate, seed)) for seed in SEEDS] for row in ROWS}
    return {"peaks": peaks, "runs": {row: [each.result() for each in made[row]] for row in ROWS}}


def peak(runs: StoredRuns, row: str) -> float:
    """Return the highest of ``RATES`` at which the average latency per output token keeps the limit; 0 for none."""
    limit_s = slo_s()

    def holds(rate: float) -> bool:
        return bool(stored_case(runs, Case(row, rate, SEEDS[0]))["latency_per_token_s"] <= limit_s)

    return highest(RATES, holds) or 0.0


def stored_case(runs: StoredRuns, case: Case) -> dict[str, Any]:
    """Run a case, and keep it even if another one fails."""
    return runs.get(case.name, lambda: run_case(case))


def run_case(case: Case, duration_s: float = DURATION_S) -> dict[str, Any]:
    """Return the figures of a case."""
    profile = load_profile(PROFILE)
    setting = ClusterSetting(
        profile=profile,
        replicas=REPLICAS,
        adapters=tuple(synthetic_adapters(ADAPTERS, (server.RANK,), profile.geometry)),
        limits_s=(slo_s(),),
    )
    return run_cluster(case.row, setting, requests_of(case, duration_s), case.seed)


def requests_of(case: Case, duration_s: float) -> list[WorkloadRequest]:
    """Return calls of adapters that stand for functions, each in bursts of its own."""
    rates = Rates.constant(case.rate)
    recipe = Recipe(
        arrivals=FUNCTION_ARRIVALS,
        function_chunk=SKEW,
        variation=server.VARIATION,
        lengths=server.lengths(),
        rates=rates,
        count=round(case.rate * duration_s),
        adapters=tuple(adapter_names(ADAPTERS)),
        seed=case.seed,
    )
    return at_rate(recipe.requests(), rates)


def slo_s() -> float:
    """Return the limit of the average latency per output token: ten decode steps, as the paper has it (7.1)."""
    form, step = KernelForm.EINSUM, SequenceWork(server.MEAN_TOKENS[0], 1, True, None, 0.0)
    return paper.SLO_STEPS * CostModel(load_profile(PROFILE), form).step_s(step_work([step], form))


def largest_share() -> float:
    """Return the share of all calls that the most popular adapter has."""
    return float(popularity(ADAPTERS, chunk=SKEW).max())


def out_of_order(found: Found) -> list[str]:
    """Return where the systems do not come in the order that the paper prints, in words."""
    peaks = found["peaks"]
    wrong = [
        f"{row} bears {peaks[row]:.1f}/s, {OURS} {peaks[OURS]:.1f}" for row in SEARCHED if peaks[row] > peaks[OURS]
    ]
    for key, words in (("ttft_mean_s", "TTFT"), ("latency_per_token_s", "latency per token")):
        made = {row: mean_of(found["runs"][row], key) for row in (OURS, PROACTIVE, ROUND_ROBIN)}
        if list(made.values()) != sorted(made.values()):
            wrong.append(f"mean {words} of " + ", ".join(f"{row} {each:.2f} s" for row, each in made.items()))
    return wrong
