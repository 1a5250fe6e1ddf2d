"""Chooses the adapter of each request by the distributions of papers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from lorikeet.workloads.function_trace import popularity
from lorikeet.workloads.workload import OptionError

T = TypeVar("T")


class AdapterSequence(NamedTuple):
    """Holds the input of a choice rule.

    Attributes:
        times_s: arrival times of the requests, in order.
        ranks: the adapters' ranks, in the order of their names.
        generator: source of the draws.
    """

    times_s: np.ndarray
    ranks: Sequence[int]
    generator: np.random.Generator


def choose_adapters(
    rule: str,
    names: Sequence[T],
    times_s: Sequence[float],
    generator: np.random.Generator,
    ranks: Sequence[int] | None = None,
) -> list[T]:
    """Return the name of each request's adapter.

    Args:
        rule: one of ``ADAPTER_CHOICES``; see the functions of ``RULES``.
        names: names of the adapters, at least one.
        times_s: arrival times of the requests, in order.
        generator: source of the draws.
        ranks: the adapters' ranks, for rules that use them.

    Raises:
        OptionError: the rule is unknown, its numbers are wrong, ranks are missing, or names are too few.
    """
    name, *texts = rule.split(":")
    if name not in RULES:
        raise OptionError(f"adapter choice {rule!r} must be one of {', '.join(ADAPTER_CHOICES)}")
    numbers = _numbers(rule, name, texts)
    if name.startswith("rank-") and ranks is None:
        raise OptionError(f"adapter choice {rule!r} needs the adapters' ranks")
    choice = AdapterSequence(np.asarray(times_s, np.float64), [1] * len(names) if ranks is None else ranks, generator)
    return [names[index] for index in RULES[name].choose(choice, *numbers)]


def _uniform(choice: AdapterSequence) -> np.ndarray:
    """Choose each adapter with the same probability: ELORA's Random (section VIII-I)."""
    return choice.generator.integers(len(choice.ranks), size=len(choice.times_s))


def _round_robin(choice: AdapterSequence) -> np.ndarray:
    """Choose the adapters in turn."""
    return np.arange(len(choice.times_s)) % len(choice.ranks)


def _distinct(choice: AdapterSequence) -> np.ndarray:
    """Choose no adapter twice: ELORA's Distinct."""
    if len(choice.times_s) > len(choice.ranks):
        raise OptionError(
            f"{len(choice.times_s)} requests cannot have distinct adapters: there are {len(choice.ranks)}"
        )
    return np.arange(len(choice.times_s))


def _zipf(choice: AdapterSequence, exponent: float) -> np.ndarray:
    """Choose the i-th adapter in proportion to 1 / i^exponent."""
    return _draw(choice, powers(len(choice.ranks), exponent), len(choice.times_s))


def _skewed(choice: AdapterSequence, deviation: float) -> np.ndarray:
    """Choose by a Gaussian over the adapters' positions, centred on the middle: ELORA's Skewed-x.

    The paper does not print its centre.
    """
    if not deviation > 0:
        raise OptionError(f"skewed:{deviation:g} needs a positive standard deviation, in adapters")
    count = len(choice.ranks)
    distances = (np.arange(count) - (count - 1) / 2) / deviation
    # Distances are relative to the middle adapters, so that their weights never underflow to 0.
    weights = np.exp(-(distances**2 - (distances**2).min()) / 2)
    return _draw(choice, weights, len(choice.times_s))


def _drifting(choice: AdapterSequence, exponent: float, period_s: float) -> np.ndarray:
    """Choose by Zipf's law, with an order that shifts by one adapter every ``period_s``."""
    if not period_s > 0:
        raise OptionError(f"drifting:{exponent:g}:{period_s:g} needs a positive number of seconds")
    turns = ((choice.times_s - choice.times_s.min(initial=np.inf)) // period_s).astype(np.int64)
    return (_zipf(choice, exponent) + turns) % len(choice.ranks)


def _functions(choice: AdapterSequence, chunk: float = 0) -> np.ndarray:
    """Choose adapters with the frequencies of Azure's functions; see ``popularity``."""
    return _draw(choice, popularity(len(choice.ranks), chunk=int(chunk) or None), len(choice.times_s))


def _rank_power(choice: AdapterSequence, exponent: float, within: float = 0.0) -> np.ndarray:
    """Choose the i-th smallest rank in proportion to 1 / i^exponent (Chameleon 5.1, LoRAServe V-H)."""
    return _by_rank(choice, powers(len(set(choice.ranks)), exponent)[None, :], within)


def _rank_halving(choice: AdapterSequence) -> np.ndarray:
    """Choose each rank half as often as the next smaller rank: LoRAServe's Exponential (V-E).

    The paper does not print its base.
    """
    return _by_rank(choice, 0.5 ** np.arange(len(set(choice.ranks)))[None, :], 0.0)


def _rank_shifting(choice: AdapterSequence) -> np.ndarray:
    """Shift half of the requests over time from the largest rank to the smallest: LoRAServe's Shifting Skew (V-E)."""
    count = len(set(choice.ranks))
    if count < 2:
        raise OptionError("rank-shifting needs adapters of at least two ranks")
    first_s = choice.times_s.min(initial=np.inf)
    last_s = choice.times_s.max(initial=0.0)
    passed = (choice.times_s - first_s) / (last_s - first_s) if last_s > first_s else np.zeros(len(choice.times_s))
    rest = 0.5 / (count - 1)
    shares = np.full((len(choice.times_s), count), rest)
    shares[:, -1] = 0.5 - (0.5 - rest) * passed
    shares[:, 0] = rest + (0.5 - rest) * passed
    return _by_rank(choice, shares, 0.0)


def _by_rank(choice: AdapterSequence, weights: np.ndarray, within: float) -> np.ndarray:
    """Choose a rank, then an adapter of that rank.

    Args:
        choice: input of the rule.
        weights: weight of each rank in ascending order, shape (requests or 1, ranks).
        within: exponent of Zipf's law among the adapters of a rank; 0 for equal probabilities.
    """
    requests = len(choice.times_s)
    borders = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)[:, :-1]
    rank_indices = (choice.generator.random(requests)[:, None] >= borders).sum(axis=1)
    chosen = np.zeros(requests, np.int64)
    ranks = np.array(choice.ranks)
    for index, rank in enumerate(sorted(set(choice.ranks))):
        members = np.flatnonzero(ranks == rank)
        here = rank_indices == index
        chosen[here] = members[_draw(choice, powers(len(members), within), int(here.sum()))]
    return chosen


def powers(count: int, exponent: float) -> np.ndarray:
    """Return i^−exponent for i from 1 to ``count``, divided by their sum."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def _draw(choice: AdapterSequence, weights: np.ndarray, count: int) -> np.ndarray:
    return choice.generator.choice(len(weights), size=count, p=weights / weights.sum())


class ChoiceRule(NamedTuple):
    """One rule.

    Attributes:
        choose: returns the index of an adapter for each request.
        numbers: arguments after the name; those in brackets are optional.
    """

    choose: Callable[..., np.ndarray]
    numbers: tuple[str, ...] = ()

    def form(self, name: str) -> str:
        """Return the syntax of the rule."""
        return ":".join((name, *self.numbers)).replace(":[", "[:")


RULES = {
    "uniform": ChoiceRule(_uniform),
    "round-robin": ChoiceRule(_round_robin),
    "distinct": ChoiceRule(_distinct),
    "zipf": ChoiceRule(_zipf, ("A",)),
    "skewed": ChoiceRule(_skewed, ("X",)),
    "drifting": ChoiceRule(_drifting, ("A", "S")),
    "functions": ChoiceRule(_functions, ("[CHUNK]",)),
    "rank-power": ChoiceRule(_rank_power, ("A", "[B]")),
    "rank-halving": ChoiceRule(_rank_halving),
    "rank-shifting": ChoiceRule(_rank_shifting),
}

ADAPTER_CHOICES = tuple(rule.form(name) for name, rule in RULES.items())


def _numbers(rule: str, name: str, texts: Sequence[str]) -> list[float]:
    wanted = RULES[name].numbers
    needed = sum(not number.startswith("[") for number in wanted)
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    finite = bool(np.isfinite(numbers).all())
    if not needed <= len(numbers) <= len(wanted) or len(numbers) != len(texts) or not finite:
        raise OptionError(f"adapter choice {rule!r} should read {RULES[name].form(name)}, with numbers")
    return numbers
