"""Which steps are measured: chosen so that each constant of the model is told from the others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lorikeet.bench.profiling.rig import SLACK_TOKENS
from lorikeet.costs.model import SequenceWork

Step = tuple[SequenceWork, ...]
Adapters = Mapping[int, Sequence[str]]
"""Rank → digests of the loaded adapters of that rank, ascending."""

_CONTEXTS = (64, 256, 1024, 3072)
_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LATE_START = 1024
_SPLIT_TOKENS = 256
_MIXED = ((1, 64), (2, 128), (4, 32), (8, 128), (16, 256), (31, 64), (31, 480))
"""Decodes beside the tokens of one prefill chunk."""
_MIXED_CONTEXT = 192
_LORA_CONTEXT = 128


class Limits(NamedTuple):
    """What a step may hold.

    Attributes:
        sequences: at most.
        step_tokens: computed in it.
        sequence_tokens: of one sequence.
        kv_tokens: of all its sequences.
    """

    sequences: int
    step_tokens: int
    sequence_tokens: int
    kv_tokens: int

    def allows(self, step: Step) -> bool:
        """Whether the step keeps to all of them; a decode may be repeated."""
        return (
            len(step) <= self.sequences
            and sum(sequence.tokens for sequence in step) <= self.step_tokens
            and all(sequence.start + sequence.tokens + SLACK_TOKENS < self.sequence_tokens for sequence in step)
            and sum(sequence.start + sequence.tokens + SLACK_TOKENS for sequence in step) <= self.kv_tokens
        )


def base_steps(limits: Limits) -> list[Step]:
    """Return steps without adapters: decodes, prefills, rows that sample, and decodes beside a prefill."""
    found = [*_decodes(limits), *_prefills(limits), *_samplings(limits), *_mixtures()]
    return list(dict.fromkeys(step for step in found if limits.allows(step)))


def decodes(count: int, context_tokens: int) -> Step:
    """Return decodes that have so much context each, themselves excluded."""
    return (SequenceWork(context_tokens, 1, True, None, 0),) * count


def prefills(count: int, tokens: int, *, start: int = 0, sampling: int | None = None) -> Step:
    """Return chunks of ``tokens`` each, of which the first ``sampling`` yield a token (None: all)."""
    samples = count if sampling is None else sampling
    return tuple(SequenceWork(start, tokens, i < samples, None, 0) for i in range(count))


def _doubling(limit: int) -> list[int]:
    counts = [1]
    while 2 * counts[-1] < limit:
        counts.append(2 * counts[-1])
    return sorted({*counts, limit})


def _decodes(limits: Limits) -> Iterator[Step]:
    contexts = [*_CONTEXTS, limits.sequence_tokens // 2]
    for count in _doubling(limits.sequences):
        yield from (decodes(count, context) for context in contexts if context <= _CONTEXTS[-1])
    yield decodes(4, 64) + decodes(4, 1024)


def _prefills(limits: Limits) -> Iterator[Step]:
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


def _samplings(limits: Limits) -> Iterator[Step]:
    for count in _doubling(min(limits.sequences, limits.step_tokens // 2)):
        for sampling in {0, count // 2, count}:
            yield prefills(count, 2, sampling=sampling)


def _mixtures() -> Iterator[Step]:
    for count, tokens in _MIXED:
        yield decodes(count, _MIXED_CONTEXT) + prefills(1, tokens, sampling=tokens % 3 and 1)


def lora_steps(adapters: Adapters, limits: Limits) -> list[Step]:
    """Return steps of one to all adapters: decodes of many rows and of many ranks, prefills, and both together."""
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
    small, middle, large = firsts[0], firsts[len(firsts) // 2], firsts[-1]
    # A rank adds a thousandth to a chunk, so what tells it from the noise is many ranks over many tokens.
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
    """Return the step once for each adapter, beside each other."""
    return tuple(sequence for which in adapters for sequence in _under(step, *which))
