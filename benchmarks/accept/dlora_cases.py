"""The modelled runs of modes.4, and how they are made: each a part of the line that can be made in any process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.accept import dlora_figures as paper
from benchmarks.accept.admission_common import part_name, two_processes
from benchmarks.accept.modes_modelled import ModeSetting, run_modes, work_of
from benchmarks.accept.modes_phases import ADAPTERS as PHASE_ADAPTERS
from benchmarks.accept.modes_phases import Phased
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.arrivals import at_rate
from lorikeet.bench.choices import Range
from lorikeet.bench.function_trace import popularity
from lorikeet.bench.peak import find_peak
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.bench.synthetic import ATTENTION, adapter_names
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work

PROFILE = "a100-80-llama-2-7b"
OURS, MERGED, UNMERGED = "dlora", "merged-only", "unmerged-only"
ROWS = (OURS, MERGED, UNMERGED, "dlora:peft", "dlora:vllm-uniform", "dlora:s-lora")
ABLATIONS = ("dlora:no-credits", "dlora:no-tuning", "dlora:alone")
RANK = 8
SKEWS = (1, 10, 100, 1000)
"""Functions that follow one another to the same adapter (7.1)."""
ADAPTERS, VARIATION, REQUESTS = 8, 4.0, 1_500
PHASES = Phased(phase_s=120.0, prompt_tokens=Range(1, 321), output_tokens=Range(1, 675))
"""With ShareGPT's means; see ``modes_phases``."""
PHASE_LOAD = 0.7
PRECISION = 0.05
SEED = 7
MEAN_TOKENS = (161, 338)
"""Of ShareGPT's prompts and answers, as the paper of vLLM prints them (Kwon and others, 2023, Fig. 11)."""
_SIGMA, _LENGTHS, _LONGEST = 1.0, 10_000, 2048
_LINE = "modes.4"

Peak = dict[str, Any]


def setting(adapters: int) -> ModeSetting:
    """Return where all rows run."""
    return ModeSetting(profile=load_profile(PROFILE), adapters=adapters, rank=RANK, modules=ATTENTION)


def measure(runs: StoredRuns) -> dict[str, Any]:
    """Return the peaks, and the runs by their names. Each part is kept as soon as it is there; two are made at a time.

    Returns:
        ``peaks``: of dLoRA by skew, and of the unmerged engine on the phases. ``skews``: by skew and row at that peak.
        ``phases``: by row at the share of that peak.
    """
    with two_processes() as pool:
        waiting = {str(skew): pool.submit(stored_peak, OURS, skew) for skew in SKEWS}
        waiting["phases"] = pool.submit(stored_peak, UNMERGED, None)
        peaks = {name: each.result() for name, each in waiting.items()}
        rows = (*ROWS, *ABLATIONS)
        skews = {
            str(skew): {row: pool.submit(stored_run, row, skew, peaks[str(skew)]["rate"]) for row in rows}
            for skew in SKEWS
        }
        rate = PHASE_LOAD * peaks["phases"]["rate"]
        phases = {row: pool.submit(stored_run, row, None, rate) for row in rows}
        return {
            "peaks": peaks,
            "skews": {skew: {row: each.result() for row, each in made.items()} for skew, made in skews.items()},
            "phases": {row: each.result() for row, each in phases.items()},
        }


def stored_peak(row: str, skew: int | None) -> Peak:
    """Search a row's peak in a process of its own; None stands for the phases."""
    name = "phases" if skew is None else f"skew-{skew}"
    return StoredRuns(_LINE).get(f"peak-{name}", partial(_peak, partial(run_at, row, skew)))


def stored_run(row: str, skew: int | None, rate: float) -> dict[str, Any]:
    """Run a row at a rate in a process of its own."""
    name = "phases" if skew is None else f"skew-{skew}"
    return StoredRuns(_LINE).get(f"{name}-{part_name(row)}-{rate:.3f}", partial(run_at, row, skew, rate))


def run_at(row: str, skew: int | None, rate: float) -> dict[str, Any]:
    """Return a row's figures on functions of a skew, or on the phases."""
    if skew is None:
        return run_modes(row, setting(PHASE_ADAPTERS), PHASES.work(rate))
    return run_modes(row, setting(ADAPTERS), work_of(functions(rate, skew), adapter_names(ADAPTERS), SEED))


def _peak(figures_at: Callable[[float], Mapping[str, Any]]) -> Peak:
    """Search the highest rate at which the average latency per output token keeps the limit."""
    limit_s = slo_s()
    seen: dict[str, float] = {}

    def attainment(rate: float) -> float:
        latency_s = float(figures_at(rate)["latency_per_token_s"])
        seen[f"{rate:.3f}"] = latency_s
        return limit_s / latency_s

    peak = find_peak(attainment, 1.0, 4.0, precision=PRECISION)
    if peak.rate is None:
        raise RuntimeError(f"no rate keeps {limit_s:.3f} s per output token: {seen}")
    return {"rate": peak.rate, "latency_per_token_s": seen}


def slo_s() -> float:
    """Return the limit of the average latency per output token: ten decode steps, as the paper has it (7.1)."""
    form, step = KernelForm.EINSUM, SequenceWork(MEAN_TOKENS[0], 1, True, None, 0.0)
    return paper.SLO_STEPS * CostModel(load_profile(PROFILE), form).step_s(step_work([step], form))


def functions(rate: float, skew: int, count: int = REQUESTS) -> list[WorkloadRequest]:
    """Return calls of adapters that stand for functions, each in bursts of its own."""
    rates = Rates.constant(rate)
    recipe = Recipe(
        arrivals=FUNCTION_ARRIVALS,
        function_chunk=skew,
        variation=VARIATION,
        lengths=lengths(),
        rates=rates,
        count=count,
        adapters=tuple(adapter_names(ADAPTERS)),
        seed=SEED,
    )
    return at_rate(recipe.requests(), rates)


def largest_share(skew: int) -> float:
    """Return the share of all calls that the most popular adapter has."""
    return float(popularity(ADAPTERS, chunk=skew).max())


def lengths() -> tuple[WorkloadRequest, ...]:
    """Return requests as long as ShareGPT's on average, log-normal."""
    generator = np.random.default_rng(SEED)
    drawn = [generator.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, _LENGTHS) for mean in MEAN_TOKENS]
    tokens = np.clip(np.rint(np.stack(drawn)), 1, _LONGEST).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())
