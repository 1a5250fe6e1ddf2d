"""The phases of modes.3 and modes.4: one adapter has nearly all requests, then all have as many, then the one again."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lorikeet.bench.arrivals import at_rate
from lorikeet.bench.choices import Range
from lorikeet.bench.exchange import Exchange
from lorikeet.bench.memory_work import MemoryWork
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names

ADAPTERS, SHARE = 32, 0.95
PHASES = ("skewed", "uniform", "skewed again")
WORDS = (
    f"{ADAPTERS} adapters; in a third of the time each {SHARE:.0%} of the requests for one of them, all with the same "
    "probability, and the one again"
)


class Phased(NamedTuple):
    """What is run.

    Attributes:
        phase_s: how long each phase lasts.
        prompt_tokens, output_tokens: of the requests.
        seed: of all that is drawn. Adapters and lengths do not depend on the rate.
    """

    phase_s: float
    prompt_tokens: Range
    output_tokens: Range
    seed: int = 3

    def work(self, rate: float) -> MemoryWork:
        """Return the requests at a rate: Poisson arrivals, stretched to have exactly that."""
        names, rates = tuple(adapter_names(ADAPTERS)), Rates.constant(rate)
        recipe = Recipe(
            rates=rates,
            count=round(len(PHASES) * self.phase_s * rate),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            adapters=names,
            seed=self.seed,
        )
        generator = np.random.default_rng(self.seed)
        requests = [
            msgspec.structs.replace(each, adapter=self._adapter(names, each.arrival_s, generator))
            for each in at_rate(recipe.requests(), rates)
        ]
        return MemoryWork(requests, names, 2, self.seed)

    def phase(self, arrival_s: float) -> str:
        """Return the phase in which a request comes."""
        return PHASES[min(len(PHASES) - 1, int(arrival_s / self.phase_s))]

    def _adapter(self, names: Sequence[str], arrival_s: float, generator: np.random.Generator) -> str:
        is_first, other = generator.random() < SHARE, int(generator.integers(len(names)))
        if self.phase(arrival_s) == "uniform":
            return names[other]
        return names[0] if is_first else names[1 + other % (len(names) - 1)]

    def figures(self, exchanges: Sequence[Exchange]) -> dict[str, dict[str, Any]]:
        """Return what is worth keeping of the requests of each phase, as plain data.

        Raises:
            RuntimeError: one of them failed.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in PHASES:
            own = [each for each in exchanges if self.phase(each.due_s) == name]
            failed = [each for each in own if each.error is not None or each.ttft_s is None]
            if failed:
                raise RuntimeError(f"{len(failed)} requests of the {name} phase failed: {failed[0].message}")
            latencies_s = [each.ended_s - each.due_s for each in own]
            tokens = [each.output_tokens for each in own]
            ttft_s = [each.ttft_s or 0.0 for each in own]
            found[name] = {
                "requests": len(own),
                "latency_per_token_s": sum(latencies_s) / sum(tokens),
                "latencies_s": [round(each, 4) for each in latencies_s],
                "tokens": tokens,
                "ttft_s": [round(each, 4) for each in ttft_s],
                "ttft_mean_s": fmean(ttft_s),
                "ttft_p99_s": float(np.percentile(ttft_s, 99)),
            }
        return found
