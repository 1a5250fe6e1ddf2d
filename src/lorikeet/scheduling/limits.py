"""How much the scheduler may do at once."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a plan.

    Attributes:
        max_num_seqs: most sequences that hold blocks.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest sequence.
        num_scheduler_steps: most identical decode steps in one plan.
        multi_step_limit_s: a repeat ends after this time.
        overlaps: whether the executor returns after each step of a repeat, if it can with the next one under way. Then
            the two above hold while requests wait; plans for whom nobody waits are longer, unless ``num_scheduler_steps`` is 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_scheduler_steps: int = 1
    multi_step_limit_s: float = 0.05
    overlaps: bool = False
