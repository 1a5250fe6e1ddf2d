"""Makes conversations in workloads: shared prefixes, scaled lengths, and prompts that contain generated answers."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import OptionError, WorkloadRequest


def scale_lengths(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Return ``requests`` with prompts and answers ``factor`` times as long, at least one token."""
    return [
        msgspec.structs.replace(
            request,
            input_tokens=max(1, round(request.input_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
        )
        for request in requests
    ]


def scaled_block_tokens(block_size: int, factor: float) -> int:
    """Return the length of a prefix block of ``block_size`` after scaling, for example 32 for 512 by 1/16.

    Raises:
        OptionError: the length would not be a whole number of at least 2.
    """
    scaled = block_size * factor
    if scaled < 2 or scaled != round(scaled):
        raise OptionError(
            f"a length scale of {factor:g} makes {scaled:g} of {block_size} tokens; "
            f"blocks need a whole number from 2 on, for example by {2 / block_size:g}, {1 / 16:g} or {1 / 8:g}"
        )
    return round(scaled)


def scale_blocks(
    requests: Sequence[WorkloadRequest], factor: float, block_size: int, answer_factor: float | None = None
) -> list[WorkloadRequest]:
    """Return ``requests`` with scaled lengths, so that each request keeps its number of blocks.

    A full block stays full, and a partial one stays partial: a prompt of 6,758 tokens (13 blocks of 512 and 102 tokens)
    scaled by 1/16 has 422 (13 blocks of 32 and 6 tokens). ``scale_lengths`` would lose blocks to rounding.

    Args:
        requests: requests with prefix blocks of ``block_size``.
        factor: factor that makes ``scaled_block_tokens`` whole.
        block_size: length of a block before scaling.
        answer_factor: factor for answers; None for ``factor``.

    Raises:
        OptionError: blocks would not be whole.
    """
    scaled = scaled_block_tokens(block_size, factor)
    found = []
    for request in requests:
        full, rest = divmod(request.input_tokens, block_size)
        rest_tokens = min(max(1, round(rest * factor)), scaled - 1) if rest else 0
        output_tokens = max(1, round(request.output_tokens * (answer_factor or factor)))
        found.append(
            msgspec.structs.replace(
                request,
                input_tokens=full * scaled + rest_tokens,
                output_tokens=output_tokens,
                prefix_block_tokens=scaled if request.prefix_blocks else 0,
            )
        )
    return found


def group_conversations(requests: Sequence[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    """Return the conversations of a trace in the order of their first requests.

    Two requests belong together if their prompts share more than the common beginning of all prompts of the trace (in
    Mooncake's conversation trace one block, the service's system prompt). A request without further blocks is a
    separate conversation.

    Args:
        requests: the requests in the order of arrival.
    """
    common = _common_blocks(requests)
    found: dict[tuple[int, ...], list[WorkloadRequest]] = {}
    for number, request in enumerate(requests):
        own = request.prefix_blocks[common : common + 1]
        found.setdefault(own or (-1, number), []).append(request)
    return [
        [msgspec.structs.replace(turn, conversation=f"conversation-{number:05d}") for turn in turns]
        for number, turns in enumerate(found.values())
    ]


def sample_complete(
    conversations: Sequence[Sequence[WorkloadRequest]],
    generator: np.random.Generator,
    count: int | None = None,
    most_tokens: int | None = None,
    least_turns: int = 1,
) -> list[list[WorkloadRequest]]:
    """Return a random sample of complete conversations, in their order.

    Args:
        conversations: all conversations.
        generator: source of the random choice. The first conversations alone would crowd the start and leave only late
            turns at the end.
        count: smallest number of requests, if the conversations have so many; None for all.
        most_tokens: limit of prompt and answer together. A conversation with a longer request is left out.
        least_turns: number of requests below which a conversation is left out.
    """
    taken = []
    requests = 0
    for place in generator.permutation(len(conversations)).tolist():
        turns = conversations[place]
        if count is not None and requests >= count:
            break
        is_short = most_tokens is None or all(turn.input_tokens + turn.output_tokens <= most_tokens for turn in turns)
        if is_short and len(turns) >= least_turns:
            taken.append(place)
            requests += len(turns)
    return [list(conversations[place]) for place in sorted(taken)]


def flatten(conversations: Sequence[Sequence[WorkloadRequest]]) -> list[WorkloadRequest]:
    """Return all requests in the order of arrival. At equal times, they are in the order of their conversations."""
    return sorted((turn for turns in conversations for turn in turns), key=lambda turn: turn.arrival_s)


def first_complete(requests: Sequence[WorkloadRequest], count: int) -> list[WorkloadRequest]:
    """Return the requests of the first complete conversations that together have ``count`` requests, by arrival.

    Args:
        requests: the requests in the order of arrival. A request without a conversation counts as a conversation.
        count: smallest number of requests, if there are so many.
    """
    conversations: dict[str | int, list[WorkloadRequest]] = {}
    for number, request in enumerate(requests):
        conversations.setdefault(request.conversation or number, []).append(request)
    taken: list[list[WorkloadRequest]] = []
    missing = count
    for turns in conversations.values():
        if missing <= 0:
            break
        taken.append(turns)
        missing -= len(turns)
    return flatten(taken)


def _common_blocks(requests: Sequence[WorkloadRequest]) -> int:
    """Return the number of leading blocks that all requests share."""
    if len(requests) < 2:
        return 0
    common = requests[0].prefix_blocks
    for request in requests[1:]:
        pairs = enumerate(zip(common, request.prefix_blocks, strict=False))
        shorter = min(len(common), len(request.prefix_blocks))
        common = common[: next((place for place, (one, other) in pairs if one != other), shorter)]
    return len(common)


class Turns:
    """Makes the prompts of a workload one by one.

    A turn's prompt is made after the answer to the earlier turn that it continues.

    Args:
        workload: the requests, ordered by arrival.
        prompts: maker of the text that no earlier turn contains.
    """

    def __init__(self, workload: Sequence[WorkloadRequest], prompts: Prompts) -> None:
        self._workload = workload
        self._prompts = prompts
        self._before = turns_before(workload, prompts.block_size)
        self._after: dict[int, list[int]] = {}
        for index, before in enumerate(self._before):
            if before is not None:
                self._after.setdefault(before, []).append(index)
        # Texts that later turns continue: prompts of running turns, and prompts with answers of finished turns.
        self._running: dict[int, list[int]] = {}
        self._finished: dict[int, list[int]] = {}

    @property
    def await_answers(self) -> bool:
        """Return whether requests still wait for an answer."""
        return bool(self._after)

    def first(self) -> Iterator[int]:
        """Yield the indices of the requests that do not wait for another request."""
        return (index for index, before in enumerate(self._before) if before is None)

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of a request, at most once. The turn that the request continues has been answered."""
        token_ids = self._prompts.token_ids(index, self._workload[index])
        before = self._finished.pop(index, [])
        # If an answer ended early, the rest is generated as for a first turn, so that the length stays the same.
        token_ids[: len(before)] = before[: len(token_ids)]
        if index in self._after:
            self._running[index] = token_ids
        return token_ids

    def answered(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Add an answer, and return the indices of the requests that may be sent now."""
        if index not in self._after:
            return []
        text = [*self._running.pop(index), *token_ids]
        after = self._after.pop(index)
        self._finished.update(dict.fromkeys(after, text))
        return after


def turns_before(workload: Sequence[WorkloadRequest], block_size: int) -> list[int | None]:
    """Return the index of the turn that each request continues; None if there is none.

    A request continues the last earlier turn of its conversation with the same adapter, if it begins with the turn's
    full prefix blocks, and if the turn's prompt and answer are shorter than the request's prompt.

    Args:
        workload: the requests, ordered by arrival.
        block_size: length of a prefix block.
    """
    conversations: dict[str, list[int]] = {}
    found: list[int | None] = []
    for index, request in enumerate(workload):
        earlier = conversations.setdefault(request.conversation, []) if request.conversation is not None else []
        candidates = (place for place in reversed(earlier) if _continues(workload[place], request, block_size))
        found.append(next(candidates, None))
        earlier.append(index)
    return found


def _continues(before: WorkloadRequest, after: WorkloadRequest, block_size: int) -> bool:
    full = before.prefix_blocks[: before.input_tokens // block_size]
    return (
        before.adapter == after.adapter
        and after.prefix_blocks[: len(full)] == full
        and before.input_tokens + before.output_tokens < after.input_tokens
    )


def scale_conversation(
    turns: Sequence[WorkloadRequest], factor: float, block_size: int, answer_factor: float | None = None
) -> list[WorkloadRequest]:
    """Scale a conversation like ``scale_blocks``, but keep each continued turn and its answer in the next prompt.

    Users often add only a few words, which rounding would lose.

    Args:
        turns: the turns of one conversation, ordered by arrival.
        factor: see ``scale_blocks``.
        block_size: length of a block before scaling.
        answer_factor: factor for answers; None for ``factor``. Longer answers make the prompts after them longer.

    Raises:
        OptionError: blocks would not be whole.
    """
    scaled = scale_blocks(turns, factor, block_size, answer_factor)
    for place, before in enumerate(turns_before(turns, block_size)):
        if before is not None:
            least_tokens = scaled[before].input_tokens + scaled[before].output_tokens + 1
            input_tokens = max(scaled[place].input_tokens, least_tokens)
            scaled[place] = msgspec.structs.replace(scaled[place], input_tokens=input_tokens)
    return scaled
