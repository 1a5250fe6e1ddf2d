"""The rows of a batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.lora import LoraWeights
from lorikeet.worker.batch import BatchRow, GrowingInts, RankSequence, adapter_rows, build_batch

BLOCK_TOKENS = 4
CPU = torch.device("cpu")
NO_WEIGHTS = {AdapterDigest(name): LoraWeights({}, layers=1) for name in "ab"}

digests = st.sampled_from([None, AdapterDigest("a"), AdapterDigest("b")])
shares = st.lists(st.tuples(digests, st.integers(1, 5)), max_size=12)


@given(shares)
def test_every_row_lies_in_the_run_of_its_adapter_and_base_rows_in_none(
    given: list[tuple[AdapterDigest | None, int]],
) -> None:
    runs = adapter_rows([adapter for adapter, _ in given], [tokens for _, tokens in given])
    expected = [adapter for adapter, tokens in given for _ in range(tokens)]
    covered: list[AdapterDigest | None] = [None] * len(expected)
    for run in runs:
        for row in range(run.start, run.stop):
            assert covered[row] is None
            covered[row] = run.adapter
    assert covered == expected


@given(shares)
def test_runs_are_in_row_order_and_as_long_as_they_can_be(given: list[tuple[AdapterDigest | None, int]]) -> None:
    runs = adapter_rows([adapter for adapter, _ in given], [tokens for _, tokens in given])
    for left, right in pairwise(runs):
        assert left.stop <= right.start
        assert left.stop < right.start or left.adapter != right.adapter


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=8))
def test_a_growing_array_holds_all_appended_values(parts: list[list[int]]) -> None:
    array = GrowingInts([7])
    for part in parts:
        array.extend(part)
    assert array.values.tolist() == [7] + [value for part in parts for value in part]


def sequence(number: int, length: int, adapter: AdapterDigest | None = None) -> RankSequence:
    """A sequence with recognisable token ids and scattered blocks."""
    start = SequenceStart(
        RequestId(f"r{number}"),
        [1000 * number + position for position in range(length)],
        length,
        SamplingParams(max_tokens=1),
        adapter,
    )
    made = RankSequence(start)
    made.add_blocks([BlockId(100 * number + 7 * i) for i in range(-(-length // BLOCK_TOKENS))])
    return made


@st.composite
def batch_rows(draw: st.DrawFn) -> list[BatchRow]:
    rows = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        length = draw(st.integers(1, 20))
        start = draw(st.integers(0, length - 1))
        tokens = draw(st.integers(1, length - start))
        rows.append(BatchRow(sequence(number, length, draw(digests)), start, tokens, draw(st.booleans())))
    return rows


@given(batch_rows())
def test_a_batch_equals_that_of_a_plain_loop(rows: list[BatchRow]) -> None:
    batch = build_batch(rows, NO_WEIGHTS, BLOCK_TOKENS, CPU)
    expected = []
    sample_rows = []
    for row in rows:
        for position in range(row.start, row.start + row.tokens):
            block = int(row.sequence.blocks.values[position // BLOCK_TOKENS])
            token = int(row.sequence.token_ids.values[position])
            expected.append((token, position, block, position % BLOCK_TOKENS))
        if row.samples:
            sample_rows.append(len(expected) - 1)
    fields = (batch.token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
    assert batch.sample_rows.tolist() == sample_rows
    assert all(
        tensor.dtype == torch.int64
        for tensor in (*fields, batch.row_starts, batch.contexts, batch.block_tables, batch.sample_rows)
    )


@given(batch_rows())
def test_every_sequence_has_its_rows_its_context_and_its_blocks(rows: list[BatchRow]) -> None:
    batch = build_batch(rows, NO_WEIGHTS, BLOCK_TOKENS, CPU)
    assert batch.row_starts.tolist() == [0, *np.cumsum([row.tokens for row in rows])]
    assert batch.contexts.tolist() == [row.start + row.tokens for row in rows]
    for table, row in zip(batch.block_tables, rows, strict=True):
        used = -(-(row.start + row.tokens) // BLOCK_TOKENS)
        assert table[:used].tolist() == row.sequence.blocks.values[:used].tolist()
        assert not table[used:].any()


def test_a_batch_without_adapters_has_no_segments() -> None:
    batch = build_batch([BatchRow(sequence(1, 5), 0, 5, samples=True)], {}, BLOCK_TOKENS, CPU)
    assert batch.lora is None


def test_missing_tokens_and_blocks_are_named() -> None:
    short = sequence(1, 5)
    with pytest.raises(ValueError, match="request r1: tokens 4 to 6 are to be computed, it has 5"):
        build_batch([BatchRow(short, 4, 2, samples=True)], {}, BLOCK_TOKENS, CPU)
    short.token_ids.extend([1] * 5)
    with pytest.raises(ValueError, match="request r1: 9 tokens do not fit its 2 blocks of 4"):
        build_batch([BatchRow(short, 8, 1, samples=True)], {}, BLOCK_TOKENS, CPU)
