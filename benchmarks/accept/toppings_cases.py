"""The modelled runs of modes.6, and how they are made: each a part of the line that can be made in any process."""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.accept import dlora_figures as dlora
from benchmarks.accept import toppings_figures as paper
from benchmarks.accept.admission_common import part_name, two_processes
from benchmarks.accept.modes_modelled import ModeSetting, run_modes, work_of
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.arrivals import at_rate
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile, Curve, Figure
from lorikeet.scheduling.coldstart.costs import ASSISTED_MODULES

COMPOSED, SEVENTY_B = "a100-80-llama-2-7b@toppings", "a100-80x4-llama-2-70b@toppings"
SEVEN_B = "printed"
"""The first with steps as long as the paper prints them; see :func:`printed_steps`."""
OURS, CACHED, ON_DEMAND, STRAWMAN = "toppings", "cached", "toppings:on-demand", "toppings:strawman"
ABLATIONS = ("toppings:auto", "toppings:one-group", "toppings:static", "toppings:fewer-cores")
DLORA = "dlora"
ROWS = (CACHED, OURS, ON_DEMAND, STRAWMAN, "toppings:s-lora", DLORA)
REQUESTS = 2_000
SEED = 7
MEMORY_BYTES = 200 * 10**9
"""CACHED has unlimited memory (7.1). So have all here: it is not what they differ by."""
MAX_RUNNING = 1_000
"""Nobody waits for a slot: with some 200 requests under way on average, 256 slots would be full now and then, and TTFT
would tell of little else."""
LINK_BYTES_PER_S = paper.INTERRUPTED_BYTES * paper.INTERRUPTED_PER_S / paper.INTERRUPTED_SHARE
"""What the paper's share of interruptions leaves for a load if every request has one: 3.1 GB/s."""
LINKS = {"printed": LINK_BYTES_PER_S, "data sheet": 0.0}
COMPOSED_S3 = "S3 composed"

_PROMPT_QUANTILES = {1.281552: 256, 2.326348: 1000}
"""Prompts of 256 and 1,000 tokens are longer than 90 and 99 % of LMSYS-Chat-1M's (Fig. 4), by normal quantile."""
ANSWER_MEAN = 215
"""Answers are of exponential length; the paper does not print any."""
_LONGEST = 2048
_LINE = "modes.6"


class Setting(NamedTuple):
    """One of the paper's.

    Attributes:
        profile: of model and device.
        adapters, rank: of them.
        rate: requests per second.
        choice: of adapters: one after the other, so that none is asked for again soon, or as functions are called.
    """

    profile: str
    adapters: int
    rank: int
    rate: float
    choice: str = "round-robin"


SETTINGS = {
    "S1": Setting(SEVEN_B, 200, 32, 9.0),
    "S2": Setting(SEVEN_B, 200, 64, 6.0),
    "S3": Setting(SEVEN_B, 200, 64, 9.0),
    COMPOSED_S3: Setting(COMPOSED, 200, 64, 9.0),
    "S5": Setting(SEVENTY_B, 200, 32, 3.0),
    "S6": Setting(SEVENTY_B, 200, 64, 3.0),
    "MAF 128": Setting(SEVEN_B, 128, 64, 1.5, "functions"),
    "MAF 256": Setting(SEVEN_B, 256, 64, 3.6, "functions"),
    "MAF 512": Setting(SEVEN_B, 512, 64, 7.7, "functions"),
}
"""Table 2 and section 7.2."""


class Case(msgspec.Struct, frozen=True):
    """A row in a setting over a link, both by name."""

    setting: str
    link: str
    row: str

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return part_name(f"{self.setting}-{self.link}-{self.row}".replace(" ", "-"))


def all_cases() -> list[Case]:
    """Return every run: all rows in all settings over the printed link, and S3 over the data sheet's as well."""
    cases = [Case(*each) for each in product(SETTINGS, ["printed"], ROWS)]
    cases += [Case(setting, "data sheet", row) for setting, row in product(("S3", COMPOSED_S3), ROWS)]
    return cases + [Case("S3", link, row) for link, row in product(LINKS, ABLATIONS)]


def measure(runs: StoredRuns) -> dict[str, dict[str, Any]]:
    """Return the figures of all runs by their names. Each is kept as soon as it is there; two are made at a time."""
    with two_processes() as pool:
        made = {case.name: pool.submit(stored_case, case) for case in all_cases()}
        return {name: each.result() for name, each in made.items()}


def stored_case(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, and keep it even if another one fails."""
    return StoredRuns(_LINE).get(case.name, lambda: run_case(case))


def run_case(case: Case, requests: int = REQUESTS) -> dict[str, Any]:
    """Return the figures of a row in a setting."""
    about = SETTINGS[case.setting]
    setting = ModeSetting(
        profile=printed_steps() if about.profile == SEVEN_B else load_profile(about.profile),
        adapters=about.adapters,
        rank=about.rank,
        modules=ASSISTED_MODULES,
        memory_bytes=MEMORY_BYTES,
        link_bytes_per_s=LINKS[case.link],
        max_running=MAX_RUNNING,
    )
    # dLoRA loads all adapters before it begins (7.1).
    row = f"{DLORA},prefetch=all" if case.row == DLORA else case.row
    names = adapter_names(about.adapters)
    return run_modes(row, setting, work_of(requests_of(about, requests), names, SEED))


def printed_steps() -> CostProfile:
    """Return the composed profile with steps on the line through the two prefills that the paper prints.

    Its steps take three times as long as the device would need: 28 ms and 62 µs for a token. Decodes fit in: without
    adapters its lines begin at 32 and 34 ms for a batch whose context is not printed (Fig. 6).
    """
    profile = load_profile(COMPOSED)
    (few, few_s), (many, many_s) = paper.PREFILL_S.items()
    source = "TOPPINGS, Fig. 4: prefills of 256 and 1,000 tokens"
    token_s = (many_s - few_s) / (many - few)
    once_s = few_s - few * token_s
    step = msgspec.structs.replace(
        profile.step,
        tokens=Curve("tokens", ((0, once_s), (few, few_s), (many, many_s)), source=source),
        sampled_rows=Curve("rows", ((1, 0.0),), source="in tokens"),
        prefill_attention=Figure(0.0, "s/pair", source="in tokens"),
    )
    # dLoRA's share is one of the base's computation, so of these steps.
    einsum = msgspec.structs.replace(
        profile.lora_costs(KernelForm.EINSUM),
        fixed=Figure(dlora.ADAPTER_SHARE * once_s, "s", source=source),
        row=Figure(dlora.ADAPTER_SHARE * token_s, "s/token", source=source),
    )
    lora = profile.lora | {KernelForm.EINSUM: einsum}
    return msgspec.structs.replace(profile, name=SEVEN_B, step=step, lora=lora)


def requests_of(about: Setting, count: int) -> list[WorkloadRequest]:
    """Return Poisson arrivals of exactly the setting's rate, with lengths like LMSYS-Chat-1M's."""
    rates = Rates.constant(about.rate)
    recipe = Recipe(
        lengths=lengths(count, np.random.default_rng(SEED)),
        rates=rates,
        count=count,
        adapters=tuple(adapter_names(about.adapters)),
        adapter_choice=about.choice,
        seed=SEED,
    )
    return at_rate(recipe.requests(), rates)


def lengths(count: int, generator: np.random.Generator) -> tuple[WorkloadRequest, ...]:
    """Return requests with prompts of the log-normal distribution that has both printed quantiles."""
    (low, low_tokens), (high, high_tokens) = _PROMPT_QUANTILES.items()
    sigma = np.log(high_tokens / low_tokens) / (high - low)
    prompts = generator.lognormal(np.log(low_tokens) - sigma * low, sigma, count)
    answers = generator.exponential(ANSWER_MEAN, count)
    tokens = np.clip(np.rint(np.stack([prompts, answers])), 1, _LONGEST).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())


def increases(found: Mapping[str, Mapping[str, Any]], setting: str, row: str, link: str = "printed") -> paper.Increase:
    """Return by how much a row's means are above CACHED's."""
    ours, cached = (found[Case(setting, link, each).name] for each in (row, CACHED))
    return paper.Increase(*(ours[key] / cached[key] - 1 for key in ("ttft_mean_s", "tpt_mean_s", "e2e_mean_s")))
