"""Prompts of conversations that hold the answers that were really given.

A workload says how long answers are, not what they say. Whoever runs an engine in its own process sees them: the next
turn's prompt can then begin with the prompt and the answer of the turn before, as a client's would, and a cache can
find the answer's KV too.
"""

from collections.abc import Iterator, Sequence

import msgspec

from lorikeet.bench.lengths import scale_blocks
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.workload import WorkloadRequest


class Turns:
    """Makes the prompts of a workload one by one, each turn's after the answer to the one that it goes on from.

    Args:
        workload: by arrival.
        prompts: makes what no earlier turn holds.
    """

    def __init__(self, workload: Sequence[WorkloadRequest], prompts: Prompts) -> None:
        self._workload = workload
        self._prompts = prompts
        self._before = turns_before(workload, prompts.block_size)
        self._after: dict[int, list[int]] = {}
        for index, before in enumerate(self._before):
            if before is not None:
                self._after.setdefault(before, []).append(index)
        # Texts of turns that others go on from: prompts of those under way, and with the answers of those that ended.
        self._asked: dict[int, list[int]] = {}
        self._said: dict[int, list[int]] = {}

    @property
    def await_answers(self) -> bool:
        """Whether requests are left that wait for an answer."""
        return bool(self._after)

    def first(self) -> Iterator[int]:
        """Yield the places of the requests that wait for no other."""
        return (index for index, before in enumerate(self._before) if before is None)

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of a request, once; the turn that it goes on from has been answered."""
        token_ids = self._prompts.token_ids(index, self._workload[index])
        before = self._said.pop(index, [])
        # An answer may have ended early: the rest is made, as for a first turn, so that lengths stay what they are.
        token_ids[: len(before)] = before[: len(token_ids)]
        if index in self._after:
            self._asked[index] = token_ids
        return token_ids

    def answered(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Take in an answer, and return the places of the requests that may come now."""
        if index not in self._after:
            return []
        text = [*self._asked.pop(index), *token_ids]
        after = self._after.pop(index)
        self._said.update(dict.fromkeys(after, text))
        return after


def turns_before(workload: Sequence[WorkloadRequest], block_size: int) -> list[int | None]:
    """Return for each request the place of the turn that it goes on from, None if there is none.

    That is the last earlier turn of its conversation under the same adapter whose full prefix blocks it begins with and
    whose prompt and answer are shorter than its prompt.

    Args:
        workload: by arrival.
        block_size: length of a prefix block.
    """
    conversations: dict[str, list[int]] = {}
    found: list[int | None] = []
    for index, request in enumerate(workload):
        earlier = conversations.setdefault(request.conversation, []) if request.conversation is not None else []
        goes_on = (place for place in reversed(earlier) if _goes_on(workload[place], request, block_size))
        found.append(next(goes_on, None))
        earlier.append(index)
    return found


def _goes_on(before: WorkloadRequest, after: WorkloadRequest, block_size: int) -> bool:
    full = before.prefix_blocks[: before.input_tokens // block_size]
    return (
        before.adapter == after.adapter
        and after.prefix_blocks[: len(full)] == full
        and before.input_tokens + before.output_tokens < after.input_tokens
    )


def scale_conversation(
    turns: Sequence[WorkloadRequest], factor: float, block_size: int, answer_factor: float | None = None
) -> list[WorkloadRequest]:
    """Scale a conversation as ``scale_blocks`` does; a turn that went on from another still holds it and its answer.

    What a user adds is often a few words, which rounding would lose.

    Args:
        turns: of one conversation, by arrival.
        factor: see ``scale_blocks``.
        block_size: before scaling.
        answer_factor: of answers; None for ``factor``. Longer ones make the prompts after them longer.

    Raises:
        ChoiceError: blocks would not be whole.
    """
    scaled = scale_blocks(turns, factor, block_size, answer_factor)
    for place, before in enumerate(turns_before(turns, block_size)):
        if before is not None:
            least_tokens = scaled[before].input_tokens + scaled[before].output_tokens + 1
            input_tokens = max(scaled[place].input_tokens, least_tokens)
            scaled[place] = msgspec.structs.replace(scaled[place], input_tokens=input_tokens)
    return scaled
