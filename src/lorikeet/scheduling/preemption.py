"""What becomes of the KV of a sequence that must give its blocks back and will go on later."""

from collections.abc import Callable, Mapping

from lorikeet.core.plan import Tier
from lorikeet.memory.memory import Memory
from lorikeet.presets import PreemptedKv
from lorikeet.scheduling.pace import Pace

KeepsKv = Callable[[Memory, Pace, int], bool]
"""Whether it is kept, by what it would cost: of so many computed tokens."""


def _cheaper(memory: Memory, pace: Pace, tokens: int) -> bool:
    """Keep what the link moves out and in again sooner than steps of its size compute it anew."""
    blocks, tiers = memory.blocks_for(tokens), memory.tiers
    swap_s = tiers.copy_s(Tier.DEVICE, Tier.HOST, blocks) + tiers.copy_s(Tier.HOST, Tier.DEVICE, blocks)
    return swap_s <= pace.step_s(tokens, 0)


KEEPS_KV: Mapping[PreemptedKv, KeepsKv] = {
    PreemptedKv.KEPT: lambda memory, pace, tokens: True,
    PreemptedKv.DROPPED: lambda memory, pace, tokens: False,
    PreemptedKv.CHEAPER: _cheaper,
}
