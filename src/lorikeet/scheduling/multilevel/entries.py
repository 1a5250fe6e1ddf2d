"""What the queue knows of a waiting and of an admitted request."""

from dataclasses import dataclass

from lorikeet.core.request import Request
from lorikeet.scheduling.multilevel.sizes import Sizes


@dataclass(eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        request: which.
        expected_tokens: of its answer, by now: whoever ran longer than predicted is expected to go on.
        sizes: by which it is classed.
        may_pass: whether it may be admitted before an older one of its class; not again after it was sent back.
        held_s: for which it has run before.
        left_s: when it gave its blocks back to go on later, here or elsewhere.
    """

    request: Request
    expected_tokens: int
    sizes: Sizes
    may_pass: bool = True
    held_s: float = 0.0
    left_s: float = 0.0


@dataclass(eq=False)
class Admitted:
    """A request that runs.

    Attributes:
        waiting: as it waited.
        number: its class.
        admitted_s: when.
        passed: the request before which it was admitted, if it passed one: it must end by its prediction.
        deadline_tokens: of its answer: that prediction.
        reckoned_tokens: of its answer, that its holding pays for.
        adapter_tokens: that its holding pays for.
    """

    waiting: Waiting
    number: int
    admitted_s: float
    passed: Request | None
    deadline_tokens: int
    reckoned_tokens: int
    adapter_tokens: int
