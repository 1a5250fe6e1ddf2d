"""ELORA's largest setting by the modelled executor: Llama-2-70B on eight H100 for Llama3-70B on eight H800."""

from functools import cache, partial
from typing import Any, NamedTuple

from benchmarks.accept.memory_common import OURS, S_LORA, STATIC, whole
from lorikeet.bench.memory_bench import MemorySetting, modelled_rig, row_figures, run_row
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.peak import find_peak
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.bench.synthetic import adapter_names, spread
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.costs.catalog import load_profile

PROFILE = "h100x8-llama-2-70b"
ADAPTERS, RANKS = (20, 50, 100), (32, 64)
ROWS = (OURS, STATIC, S_LORA)
SLO_S = 0.5
"""Of the mean TTFT (VIII-A)."""
DURATION_S = 240.0
LOADS = (0.5, 1.0)
"""Of elora's peak."""
HOST_BYTES = 256 * 10**9
BLOCK_TOKENS = 32


class Scenario(NamedTuple):
    """A service of the paper's evaluation.

    Attributes:
        shape: of its requests.
        arrivals: of its calls.
        choice: of their adapters, where the arrivals do not tell.
        first_rate: requests per second from which the peak is searched.
    """

    shape: str
    arrivals: str
    choice: str
    first_rate: float


SCENARIOS = {
    "chatbot": Scenario("chatbot", "poisson", "zipf:1", 24.0),
    "translation": Scenario("translation", FUNCTION_ARRIVALS, "uniform", 96.0),
    "agent": Scenario("agent", FUNCTION_ARRIVALS, "uniform", 128.0),
}


def run_case(name: tuple[str, int]) -> dict[str, Any]:
    """Return the peak of every row, and all rows' figures at shares of elora's.

    Args:
        name: scenario and number of adapters.
    """
    scenario, adapters = name
    figures = cache(partial(_run_at, scenario, adapters))

    def peak(row: str, first_rate: float) -> float | None:
        """Search the highest rate at which the mean TTFT stays below the limit."""
        return find_peak(
            lambda rate: SLO_S / float(figures(row, rate)["ttft_mean_s"]), 1.0, first_rate, precision=0.1
        ).rate

    full = peak(OURS, SCENARIOS[scenario].first_rate)
    if full is None:
        raise RuntimeError(f"{scenario} with {adapters} adapters: no rate meets the limit")
    peaks = {row: full if row == OURS else peak(row, full) for row in ROWS}
    loads = {row: [figures(row, load * full) for load in LOADS] for row in ROWS}
    return {"scenario": scenario, "adapters": adapters, "peaks": peaks, "loads": loads}


def _run_at(scenario: str, adapters: int, row: str, rate: float) -> dict[str, Any]:
    work = _work(scenario, adapters, rate)
    options = WorkOptions(source=scenario, adapters=adapters, ranks=RANKS, modules=LORA_MODULES)
    profile = load_profile(PROFILE)
    setting = MemorySetting(
        memory_bytes=profile.pool_bytes,
        host_memory_bytes=HOST_BYTES,
        block_tokens=BLOCK_TOKENS,
        max_running=512,
        max_step_tokens=2048,
        max_repeat=1,
    )
    figures = row_figures(row, run_row(modelled_rig(profile, work, options), setting.settings(row), work))
    whole({"figures": figures})
    return figures


def _work(scenario: str, adapters: int, rate: float) -> MemoryWork:
    """Requests for the duration at a rate; pauses inside a dialogue stay what they are."""
    about = SCENARIOS[scenario]
    recipe = Recipe(
        shape=about.shape,
        arrivals=about.arrivals,
        variation=2.0,
        rates=Rates.constant(rate),
        duration_s=DURATION_S,
        adapters=tuple(adapter_names(adapters)),
        ranks=tuple(spread(RANKS, adapters)),
        adapter_choice=about.choice,
        block_tokens=BLOCK_TOKENS,
        seed=11,
    )
    longest_tokens = load_profile(PROFILE).max_model_tokens
    requests = [each for each in recipe.requests() if each.input_tokens + each.output_tokens <= longest_tokens]
    return MemoryWork(requests, recipe.adapters, BLOCK_TOKENS, recipe.seed)  # type: ignore[arg-type]
