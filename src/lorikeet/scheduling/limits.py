"""How much the scheduler may do at once."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a plan.

    Attributes:
        max_running: most sequences that hold blocks.
        max_step_tokens: most tokens in a step.
        max_model_tokens: longest sequence.
        max_repeat: most identical decode steps in one plan.
        repeat_limit_s: a repeat ends after this time.
        overlaps: whether the executor returns after each step of a repeat, if it can with the next one under way. Then
            the two above hold while requests wait; plans for whom nobody waits are longer, unless ``max_repeat`` is 1.
    """

    max_running: int
    max_step_tokens: int
    max_model_tokens: int
    max_repeat: int = 1
    repeat_limit_s: float = 0.05
    overlaps: bool = False
