"""Batching modes by name. A new mode is one file here and one entry in the table."""

from functools import partial
from math import inf

from lorikeet.scheduling.batching.dlora import DLora
from lorikeet.scheduling.batching.merge_paid import MergePaid
from lorikeet.scheduling.batching.merge_turns import MergeTurns
from lorikeet.scheduling.batching.mode import BatchingPolicy, Unmerged
from lorikeet.scheduling.batching.one_adapter import OneAdapter

BATCHING: dict[str, BatchingPolicy] = {
    "unmerged": Unmerged,
    "dlora": DLora,
    "dlora:patience-64": partial(DLora, patience=64),
    "dlora:patience-16384": partial(DLora, patience=16384),
    "dlora:no-credits": partial(DLora, patience=inf),
    "dlora:no-tuning": partial(DLora, tuned=False),
    "merge-turns": MergeTurns,
    "merge-paid": MergePaid,
    "merged-only": partial(OneAdapter, merged=True),
    "one-adapter": partial(OneAdapter, merged=False),
    "whole-models": partial(OneAdapter, merged=True, even_shares=True),
    **{
        f"whole-models:{turn_s:g}-s": partial(OneAdapter, merged=True, even_shares=True, turn_s=turn_s)
        for turn_s in (0.0, 0.1, 1.0, 10.0)
    },
}
"""The values of a preset's ``batching_mode``."""
