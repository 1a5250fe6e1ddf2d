"""Two plans beside each other, field by field."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from lorikeet.core.plan import StepPlan

_SHOWN = 100
"""Characters of a value that are shown."""

_MISSING = "—"


class FieldPair(NamedTuple):
    """One field of two plans, as text; ``differs`` if they are not the same."""

    name: str
    recorded: str
    replayed: str
    differs: bool


def plan_fields(recorded: StepPlan, replayed: StepPlan) -> Iterator[FieldPair]:
    """Yield every field of two plans; one that differs as the smallest parts of it that do."""
    for name in recorded.__struct_fields__:
        left, right = getattr(recorded, name), getattr(replayed, name)
        if left == right:
            yield FieldPair(name, _text(left), _text(right), differs=False)
        else:
            yield from _differing(name, left, right)


def _differing(name: str, left: Any, right: Any) -> Iterator[FieldPair]:
    if left == right:
        return
    if isinstance(left, msgspec.Struct) and type(left) is type(right):
        for field in left.__struct_fields__:
            yield from _differing(f"{name}.{field}", getattr(left, field), getattr(right, field))
    elif isinstance(left, tuple) and isinstance(right, tuple):
        for index, (one, other) in enumerate(zip_longest(left, right, fillvalue=_MISSING)):
            yield from _differing(f"{name}[{index}]", one, other)
    else:
        yield FieldPair(name, _text(left), _text(right), differs=True)


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    count = f"{len(value)}: " if isinstance(value, tuple | list) else ""
    return count + (text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
