"""Batching modes by name. A new mode is one file here and one entry in the table."""

from functools import partial

from lorikeet.scheduling.batching.dlora import DLora
from lorikeet.scheduling.batching.merge_turns import DLora as MergeTurns
from lorikeet.scheduling.batching.mode import BatchingPolicy, Unmerged
from lorikeet.scheduling.batching.one_adapter import OneAdapter

BATCHING: dict[str, BatchingPolicy] = {
    "unmerged": Unmerged,
    "dlora": DLora,
    "old": partial(MergeTurns, backfill=True),
    "dlora:no-credits": partial(DLora, credited=False),
    "dlora:no-tuning": partial(DLora, tuned=False),
    "merged-only": partial(OneAdapter, merged=True),
    "one-adapter": partial(OneAdapter, merged=False),
    "whole-models": partial(OneAdapter, merged=True, even_shares=True),
}
"""The values of a preset's ``batching_mode``."""
