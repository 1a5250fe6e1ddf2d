"""admission.7: ten tenants, one of whom sends ten times what each other does."""

from typing import Any

import numpy as np

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.traces import AZURE_CONVERSATION, unpacked
from lorikeet.bench.arrivals import arrivals_until
from lorikeet.bench.memory_bench import MemorySetting, modelled_rig, run_row
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.peak import find_peak
from lorikeet.bench.rates import Rates
from lorikeet.bench.workload import WorkloadRequest, read_azure
from lorikeet.costs.catalog import load_profile

PROFILE = "a40-llama-2-7b"
FAIR = "lorikeet:fair"
FIFO, LITERAL = f"{FAIR},admission=fifo", f"{FAIR},admission=fair:literal"
TENANTS = 10
EVEN, UNEVEN = (1.0,) * TENANTS, (10.0, *(1.0,) * (TENANTS - 1))
DURATION_S = 900.0
SLO_TIMES, UNLOADED_RATE = 5, 0.1
LOAD, OVERLOAD = 0.8, 1.2
OF_FIFO, OF_EVEN = 0.3, 1.5
BLOCK_TOKENS = 16
SEED = 17


@line(
    "admission.7",
    title="Ten tenants, one of whom sends ten times as much",
    bound=f"at {OVERLOAD:g} × peak the others' P95 TTFT ≤ {OF_FIFO:g} × FIFO's, and ≤ {OF_EVEN:g} × what it is when "
    f"all send equally at {LOAD:g} × peak",
)
def run(runs: StoredRuns) -> Result:
    """Search FIFO's peak with equal tenants, then overload it by one of them."""
    peak = runs.get("peak", _peak)
    rate = peak["rate"]
    even = runs.get("even", lambda: _run(FAIR, LOAD * rate, EVEN))
    fifo, literal, fair = (
        runs.get(f"uneven-{name}", lambda row=row: _run(row, OVERLOAD * rate, UNEVEN))  # type: ignore[misc]
        for name, row in (("fifo", FIFO), ("literal", LITERAL), ("fair", FAIR))
    )
    of_fifo = fair["others_p95_s"] / fifo["others_p95_s"]
    of_even = fair["others_p95_s"] / even["others_p95_s"]
    unfinished = sum(each["requests"] - each["completed"] for each in (even, fifo, literal, fair))
    failures = [
        *([f"the others' P95 TTFT is {of_fifo:.2f} × FIFO's"] if of_fifo > OF_FIFO else []),
        *([f"the others' P95 TTFT is {of_even:.2f} × that of an even load"] if of_even > OF_EVEN else []),
        *([f"{unfinished} requests without a whole answer"] if unfinished else []),
    ]
    return Result(
        figure={
            "of FIFO's": of_fifo,
            "of an even load's": of_even,
            "others' P95 TTFT, s": fair["others_p95_s"],
            "at an even load": even["others_p95_s"],
            "by FIFO": fifo["others_p95_s"],
            "by turns alone": literal["others_p95_s"],
            "the tenth's P95 TTFT, s": fair["busiest_p95_s"],
            "the tenth's by FIFO": fifo["busiest_p95_s"],
            "peak, requests per s": rate,
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"modelled by {PROFILE}; lengths drawn from the Azure conversation trace (2023, CC-BY 4.0) as far as "
        f"they fit its context, Poisson arrivals over {DURATION_S:g} s, base model, no host tier; peak: highest rate "
        f"of equal tenants at which FIFO's mean TTFT is ≤ {SLO_TIMES} × that at {UNLOADED_RATE:g} requests/s "
        f"({peak['slo_s']:.2f} s), as in memory.6; by turns alone: the paper's policy ({LITERAL})",
        details={"peak": peak, "even": even, "fifo": fifo, "literal": literal, "fair": fair},
    )


def _peak() -> dict[str, Any]:
    slo_s = SLO_TIMES * float(_run(FIFO, UNLOADED_RATE, EVEN)["ttft_mean_s"])
    peak = find_peak(lambda rate: slo_s / float(_run(FIFO, rate, EVEN)["ttft_mean_s"]), 1.0, 1.0, precision=0.05)
    if peak.rate is None:
        raise RuntimeError("no rate meets the limit")
    return {"slo_s": slo_s, "rate": peak.rate, "missed_rate": peak.missed_rate, "probes": peak.probes}


def _run(row: str, rate: float, weights: tuple[float, ...]) -> dict[str, Any]:
    """Return TTFT of all, of the first tenant and of the others."""
    profile = load_profile(PROFILE)
    work = _work(rate, weights, profile.max_model_tokens)
    setting = MemorySetting(
        memory_bytes=profile.pool_bytes,
        host_memory_bytes=0,
        block_tokens=BLOCK_TOKENS,
        max_running=256,
        max_step_tokens=2048,
        max_repeat=1,
    )
    options = WorkOptions(source=AZURE_CONVERSATION, adapters=0)
    done = run_row(modelled_rig(profile, work, options), setting.settings(row), work)
    exchanges = done.run.exchanges
    whole = [
        (asked.tenant, ttft_s)
        for asked, each in zip(work.requests, exchanges, strict=True)
        if each.error is None and (ttft_s := each.ttft_s) is not None
    ]
    everybodys_s = [value for _, value in whole]
    return {
        "row": row,
        "rate": rate,
        "requests": len(exchanges),
        "completed": len(whole),
        "preemptions": done.engine.preemptions,
        "all_answered_s": max(each.ended_s for each in exchanges),
        "ttft_mean_s": float(np.mean(everybodys_s)),
        "ttft_p95_s": float(np.percentile(everybodys_s, 95)),
        "busiest_p95_s": float(np.percentile([value for tenant, value in whole if tenant == "tenant-0"], 95)),
        "others_p95_s": float(np.percentile([value for tenant, value in whole if tenant != "tenant-0"], 95)),
    }


def _work(rate: float, weights: tuple[float, ...], most_tokens: int) -> MemoryWork:
    """Draw requests at a rate; of each tenant its part of ``weights``."""
    with unpacked(AZURE_CONVERSATION) as file:
        lengths = [(each.input_tokens, each.output_tokens) for each in read_azure(file)]
    lengths = [each for each in lengths if sum(each) <= most_tokens]
    of_arrivals, of_lengths, of_tenants = np.random.default_rng(SEED).spawn(3)
    times_s = arrivals_until("poisson", DURATION_S, Rates.constant(rate), of_arrivals)
    count = len(times_s)
    drawn = [lengths[place] for place in of_lengths.integers(len(lengths), size=count).tolist()]
    tenants = of_tenants.choice(TENANTS, size=count, p=np.divide(weights, sum(weights))).tolist()
    requests = [
        WorkloadRequest(at_s, None, input_tokens, output_tokens, tenant=f"tenant-{tenant}")
        for at_s, tenant, (input_tokens, output_tokens) in zip(times_s, tenants, drawn, strict=True)
    ]
    return MemoryWork(requests, (), BLOCK_TOKENS, SEED)
