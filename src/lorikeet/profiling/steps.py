"""Chooses the steps to measure, and measures them in rounds.

The steps separate each constant of the model from the others. Every round has a different order, so that a drift of the
machine favours no step.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lorikeet.core.plan import KernelForm
from lorikeet.costs.fit import LoraMeasurement, StepMeasurement
from lorikeet.costs.model import LoraWork, SequenceWork, StepWork, step_work
from lorikeet.profiling.driver import SLACK_TOKENS, ExecutorDriver

Step = tuple[SequenceWork, ...]
Adapters = Mapping[int, Sequence[str]]
"""Rank → digests of the loaded adapters of that rank, ascending."""

_CONTEXTS = (64, 256, 1024, 3072)
_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LATE_START = 1024
_SPLIT_TOKENS = 256
_MIXED = ((1, 64), (2, 128), (4, 32), (8, 128), (16, 256), (31, 64), (31, 480))
"""Number of decodes beside the tokens of a prefill chunk."""
_MIXED_CONTEXT = 192
_LORA_CONTEXT = 128


class SweepLimits(NamedTuple):
    """Holds the limits of a step.

    Attributes:
        sequences: largest number of sequences.
        step_tokens: largest number of computed tokens.
        sequence_tokens: largest number of tokens of one sequence.
        kv_tokens: largest number of tokens of all sequences.
    """

    sequences: int
    step_tokens: int
    sequence_tokens: int
    kv_tokens: int

    def allows(self, step: Step) -> bool:
        """Return whether a step is within all limits, even if a decode is repeated."""
        return (
            len(step) <= self.sequences
            and sum(sequence.tokens for sequence in step) <= self.step_tokens
            and all(sequence.start + sequence.tokens + SLACK_TOKENS < self.sequence_tokens for sequence in step)
            and sum(sequence.start + sequence.tokens + SLACK_TOKENS for sequence in step) <= self.kv_tokens
        )


def base_steps(limits: SweepLimits) -> list[Step]:
    """Return steps without adapters: decodes, prefills, rows that sample, and decodes beside a prefill."""
    found = [*_decodes(limits), *_prefills(limits), *_samplings(limits), *_mixtures()]
    return list(dict.fromkeys(step for step in found if limits.allows(step)))


def decodes(count: int, context_tokens: int) -> Step:
    """Return decodes with this context each, without the decoded token."""
    return (SequenceWork(context_tokens, 1, True, None, 0),) * count


def prefills(count: int, tokens: int, *, start: int = 0, sampling: int | None = None) -> Step:
    """Return prefill chunks of ``tokens`` each. The first ``sampling`` chunks yield a token (all if None)."""
    samples = count if sampling is None else sampling
    return tuple(SequenceWork(start, tokens, i < samples, None, 0) for i in range(count))


def _doubling(limit: int) -> list[int]:
    counts = [1]
    while 2 * counts[-1] < limit:
        counts.append(2 * counts[-1])
    return sorted({*counts, limit})


def _decodes(limits: SweepLimits) -> Iterator[Step]:
    contexts = [*_CONTEXTS, limits.sequence_tokens // 2]
    for count in _doubling(limits.sequences):
        yield from (decodes(count, context) for context in contexts if context <= _CONTEXTS[-1])
    yield decodes(4, 64) + decodes(4, 1024)


def _prefills(limits: SweepLimits) -> Iterator[Step]:
    late = min(_LATE_START, limits.sequence_tokens // 2)
    for tokens in (*_CHUNKS, limits.step_tokens):
        yield prefills(1, tokens)
        yield prefills(1, tokens, sampling=0)
        if tokens >= 16:
            yield prefills(1, tokens, start=late, sampling=0)
    for tokens in (64, 256):
        yield prefills(1, tokens, start=2 * late, sampling=0)
    for count in (2, 4, 8, 16):
        yield prefills(count, min(_SPLIT_TOKENS, limits.step_tokens) // count)
    yield prefills(2, limits.step_tokens // 2)


def _samplings(limits: SweepLimits) -> Iterator[Step]:
    for count in _doubling(min(limits.sequences, limits.step_tokens // 2)):
        for sampling in {0, count // 2, count}:
            yield prefills(count, 2, sampling=sampling)


def _mixtures() -> Iterator[Step]:
    for count, tokens in _MIXED:
        yield decodes(count, _MIXED_CONTEXT) + prefills(1, tokens, sampling=tokens % 3 and 1)


def lora_steps(adapters: Adapters, limits: SweepLimits) -> list[Step]:
    """Return steps with one to all adapters: decodes with many rows and many ranks, prefills, and both together."""
    found = [*_lora_decodes(adapters), *_lora_prefills(adapters)]
    return list(dict.fromkeys(step for step in found if limits.allows(step)))


def without_adapters(step: Step) -> Step:
    """Return the same step of the base model."""
    return tuple(msgspec.structs.replace(sequence, adapter=None, rank=0) for sequence in step)


def _under(step: Step, rank: int, digest: str) -> Step:
    return tuple(msgspec.structs.replace(sequence, adapter=digest, rank=rank) for sequence in step)


def _lora_decodes(adapters: Adapters) -> Iterator[Step]:
    one = decodes(1, _LORA_CONTEXT)
    firsts = [(rank, digests[0]) for rank, digests in adapters.items()]
    all_adapters = [(rank, digest) for rank, digests in adapters.items() for digest in digests]
    smallest, *_, largest = adapters
    for rank in (smallest, largest):
        yield from (_under(one * rows, rank, adapters[rank][0]) for rows in (1, 8, 32))
    for rank, digests in adapters.items():
        yield _distinct(one, [(rank, digest) for digest in digests])
    for rows in (1, 2):
        yield _distinct(one * rows, all_adapters)
    yield _distinct(one, firsts)
    yield _distinct(one * 2, firsts) + one * 4


def _lora_prefills(adapters: Adapters) -> Iterator[Step]:
    firsts = [(rank, digests[0]) for rank, digests in adapters.items()]
    small = firsts[0]
    middle = firsts[len(firsts) // 2]
    large = firsts[-1]
    # A rank adds a thousandth to a chunk, so only many ranks and tokens rise above the noise.
    chunks = (
        (16, (small, large)),
        (48, (small, large)),
        (128, (middle, large)),
        (256, firsts[-2:]),
        (512, (middle, large)),
    )
    for tokens, those in chunks:
        yield from (_under(prefills(1, tokens), *which) for which in those)
    yield _distinct(prefills(1, 24), [(large[0], digest) for digest in adapters[large[0]]])
    yield _distinct(prefills(1, 32), [small, large])
    yield _distinct(prefills(1, 16), firsts)
    yield _under(decodes(8, _LORA_CONTEXT), *small) + _under(prefills(1, 64), *large)


def _distinct(step: Step, adapters: Sequence[tuple[int, str]]) -> Step:
    """Return one step that repeats the given step for each adapter."""
    return tuple(sequence for which in adapters for sequence in _under(step, *which))


Tick = Callable[[], None]
"""Function that is called after each part, for the progress bar."""

_GROUPS = ((KernelForm.UNPADDED, KernelForm.PADDED), (KernelForm.EINSUM,))
"""Number of forms that are measured between two runs of the base model in a round.

Disturbances last longer than these measurements.
"""
_LEAST_ROUNDS = 8
_MOST_S = 90.0
"""Rounds in which every step with adapters is measured, and largest number of seconds for one step.

After this time a step is not measured again, even if it is imprecise, because on a slow machine all rounds of the
longest chunks would take an hour.
"""


class StepSweep:
    """Times steps without adapters in several sessions, because a machine may be faster for minutes.

    Each step is run once first, which is not counted.

    Args:
        driver: driver that runs the steps.
        steps: steps without adapters.
        num_scheduler_steps, multi_step_limit_s: settings of an engine, by which decodes are repeated.
        tick: called once for each step, and again in each round.
    """

    def __init__(
        self,
        driver: ExecutorDriver,
        steps: Sequence[Step],
        num_scheduler_steps: int,
        multi_step_limit_s: float,
        tick: Tick,
    ) -> None:
        self._driver = driver
        self._steps = steps
        self._tick = tick
        self._order = random.Random(0)
        self._prepared = {}
        self._repeats = {}
        for step in self._order.sample(steps, len(steps)):
            self._prepared[step] = driver.prepare(step)
            repeat = num_scheduler_steps if all(sequence.tokens == 1 and sequence.start > 0 for sequence in step) else 1
            self._repeats[step] = driver.run(self._prepared[step], repeat=repeat, limit_s=multi_step_limit_s).steps
            tick()
        self._seconds: dict[Step, list[float]] = {step: [] for step in steps}

    def measure(self, rounds: int) -> None:
        """Time each step ``rounds`` times."""
        for _ in range(rounds):
            for step in self._order.sample(self._steps, len(self._steps)):
                self._seconds[step].append(self._driver.run(self._prepared[step], repeat=self._repeats[step]).seconds)
                self._tick()

    def measurements(self) -> list[StepMeasurement]:
        """Return all times so far, in the order of the steps."""
        return [StepMeasurement(_work(step, self._repeats[step]), tuple(self._seconds[step])) for step in self._steps]


def measure_lora(
    driver: ExecutorDriver, steps: Sequence[Step], rounds: int, tick: Tick
) -> dict[KernelForm, list[LoraMeasurement]]:
    """Time each step in every kernel form, in turns with the same step without adapters, until its addition is precise.

    If all ranks are equal, no row is padded. In that case unpadded and padded are the same computation, and the mean of
    both times counts for each.

    Args:
        driver: driver that runs the steps and has loaded the adapters.
        steps: steps with adapters.
        rounds: number of rounds, at least one. Steps whose added time is precise enough are left out of later rounds.
        tick: called ``len(steps) * rounds`` times.
    """
    order = random.Random(0)
    points = {(form, step): LoraMeasurement(_lora_work(step, form), [], []) for form in KernelForm for step in steps}
    prepared = {step: (driver.prepare(without_adapters(step)), driver.prepare(step)) for step in steps}
    for number in range(rounds):
        for step in order.sample(steps, len(steps)):
            tick()
            groups = [
                group
                for group in order.sample(_GROUPS, len(_GROUPS))
                if number < _LEAST_ROUNDS or not _is_enough([points[form, step] for form in group])
            ]
            if not groups:
                continue
            base, adapted = prepared[step]
            driver.run(adapted)  # not counted, because the step before was a different one
            before_s = driver.run(base).seconds
            for group in groups:
                with_s = {form: driver.run(adapted, form).seconds for form in order.sample(group, len(group))}
                after_s = driver.run(base).seconds
                if len({sequence.rank for sequence in step if sequence.adapter is not None}) == 1:
                    with_s = dict.fromkeys(with_s, statistics.mean(with_s.values()))
                for form, seconds in with_s.items():
                    points[form, step].with_s.append(seconds)
                    points[form, step].base_s.append((before_s + after_s) / 2)
                before_s = after_s
    return {form: [points[form, step] for step in steps] for form in KernelForm}


def _is_enough(points: Sequence[LoraMeasurement]) -> bool:
    return all(point.is_sure for point in points) or sum(point.total_s for point in points) >= _MOST_S


def _work(step: Step, repeat: int) -> StepWork:
    """Count the work of a step in the middle of its repeats, whose context grows."""
    middle = (repeat - 1) // 2
    grown = [msgspec.structs.replace(sequence, start=sequence.start + middle) for sequence in step]
    return step_work(grown, KernelForm.UNPADDED)


def _lora_work(step: Step, form: KernelForm) -> LoraWork:
    work = step_work(step, form).lora
    assert work is not None
    return work
