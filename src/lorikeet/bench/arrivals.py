"""When requests arrive, under which adapter and how long they are: plain numbers from a seeded generator."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from lorikeet.bench.workload import WorkloadRequest

ARRIVALS = ("poisson", "bursty", "uniform", "now")
ADAPTER_CHOICES = ("uniform", "round-robin", "zipf:A", "distinct")

T = TypeVar("T")


class ChoiceError(ValueError):
    """An option has no meaning, or none for so many requests."""


class Range(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included, all equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Read ``128`` or ``64-256``.

        Raises:
            ChoiceError: it is neither.
        """
        low, dash, high = text.partition("-")
        try:
            found = cls(int(low), int(high if dash else low))
        except ValueError:
            found = cls(1, 0)
        if not 0 <= found.low <= found.high:
            raise ChoiceError(f"{text!r} is neither a number nor a range such as 64-256")
        return found

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Return ``count`` of them."""
        return generator.integers(self.low, self.high, count, endpoint=True).tolist()


def arrival_times(
    kind: str, count: int, rate: float, generator: np.random.Generator, burstiness: float = 1.0
) -> list[float]:
    """Return when each of ``count`` requests arrives, in seconds, in order.

    Args:
        kind: ``now`` all at 0; ``uniform`` equal gaps; ``poisson`` exponential gaps; ``bursty`` gamma gaps. The mean
            gap is 1 / rate.
        count: of requests.
        rate: requests per second; without effect on ``now``.
        generator: of the gaps.
        burstiness: shape of the gamma gaps, as in vLLM's benchmark: below 1 bursts, 1 Poisson, above 1 more even.

    Raises:
        ChoiceError: an unknown kind, or numbers that are not positive.
    """
    if kind not in ARRIVALS:
        raise ChoiceError(f"arrivals {kind!r} are none of {', '.join(ARRIVALS)}")
    if not rate > 0 or not burstiness > 0:
        raise ChoiceError(f"rate and burstiness must be positive, not {rate} and {burstiness}")
    match kind:
        case "now":
            return [0.0] * count
        case "uniform":
            gaps_s = np.full(count, 1 / rate)
        case "poisson":
            gaps_s = generator.exponential(1 / rate, count)
        case _:
            gaps_s = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    return np.cumsum(gaps_s).tolist()


def choose_adapters(rule: str, names: Sequence[T], count: int, generator: np.random.Generator) -> list[T]:
    """Return a name for each of ``count`` requests.

    Args:
        rule: ``uniform``; ``round-robin``; ``zipf:A``, where the i-th name has a probability in proportion to
            1 / i^A; ``distinct``, where no name comes twice.
        names: at least one.
        count: of requests.
        generator: of the choices.

    Raises:
        ChoiceError: an unknown rule, or too few names for distinct ones.
    """
    name, _, parameter = rule.partition(":")
    match name:
        case "uniform" if not parameter:
            chosen = generator.integers(len(names), size=count)
        case "round-robin" if not parameter:
            chosen = np.arange(count) % len(names)
        case "distinct" if not parameter:
            if count > len(names):
                raise ChoiceError(f"{count} requests cannot have distinct adapters: there are {len(names)}")
            chosen = np.arange(count)
        case "zipf":
            chosen = generator.choice(len(names), size=count, p=_zipf(parameter, len(names)))
        case _:
            raise ChoiceError(f"adapter choice {rule!r} is none of {', '.join(ADAPTER_CHOICES)}")
    return [names[index] for index in chosen]


def _zipf(exponent: str, count: int) -> np.ndarray:
    try:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -float(exponent)
    except ValueError:
        raise ChoiceError(f"zipf needs its exponent, for example zipf:1.1, not {exponent!r}") from None
    return weights / weights.sum()


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Return ``requests`` with all times stretched alike, so that they arrive at ``rate`` per second on average.

    Raises:
        ChoiceError: they arrive all at once, which no stretching changes.
    """
    if not requests:
        return []
    first_s = min(request.arrival_s for request in requests)
    span_s = max(request.arrival_s for request in requests) - first_s
    if not span_s > 0:
        raise ChoiceError("the requests of the workload arrive all at once and cannot be given a rate")
    # n requests have n - 1 gaps between them.
    scale = (len(requests) - 1) / rate / span_s
    return [msgspec.structs.replace(request, arrival_s=(request.arrival_s - first_s) * scale) for request in requests]


def scale_lengths(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Return ``requests`` with prompts and answers ``factor`` times as long, of one token at least."""
    return [
        msgspec.structs.replace(
            request,
            input_tokens=max(1, round(request.input_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
        )
        for request in requests
    ]
