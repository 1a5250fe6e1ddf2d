"""Decides whether the KV of a preempted sequence stays cached."""

from collections.abc import Callable, Mapping

from lorikeet.core.plan import Tier
from lorikeet.memory.memory import Memory
from lorikeet.presets import PreemptedKv
from lorikeet.scheduling.state import StepTimeEstimator

KeepKvRule = Callable[[Memory, StepTimeEstimator, int], bool]
"""Returns whether the KV of a preempted sequence is kept, given its number of computed tokens."""


def _swap_is_cheaper(memory: Memory, step_times: StepTimeEstimator, tokens: int) -> bool:
    """Return whether copying KV to the host and back takes no longer than computing it again."""
    blocks = memory.blocks_for(tokens)
    swap_s = memory.tiers.copy_s(Tier.DEVICE, Tier.HOST, blocks) + memory.tiers.copy_s(Tier.HOST, Tier.DEVICE, blocks)
    return swap_s <= step_times.step_s(tokens, 0)


KEEP_KV_RULES: Mapping[PreemptedKv, KeepKvRule] = {
    PreemptedKv.KEPT: lambda memory, step_times, tokens: True,
    PreemptedKv.DROPPED: lambda memory, step_times, tokens: False,
    PreemptedKv.CHEAPER: _swap_is_cheaper,
}
