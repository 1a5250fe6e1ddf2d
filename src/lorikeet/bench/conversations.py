"""Whole conversations of a trace that tells shared prefixes, such as Mooncake's."""

from collections.abc import Sequence

import msgspec
import numpy as np

from lorikeet.bench.workload import WorkloadRequest


def group_conversations(requests: Sequence[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    """Return the conversations of a trace, in the order of their first requests, each in its own order.

    Two requests belong together if their prompts share more than what all prompts of the trace begin with (in
    Mooncake's conversation trace one block, the service's own prompt). A request without a block of its own is a
    conversation of its own.

    Args:
        requests: in the order of arrival.
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


def take_whole(
    conversations: Sequence[Sequence[WorkloadRequest]],
    generator: np.random.Generator,
    count: int | None = None,
    most_tokens: int | None = None,
    least_turns: int = 1,
) -> list[list[WorkloadRequest]]:
    """Return some of the conversations, none of them cut, in their order.

    Args:
        conversations: all there are.
        generator: of the choice. The first ones would crowd at the start and leave their late turns alone at the end.
        count: of requests, at least, if there are as many; None for all.
        most_tokens: of prompt and answer together; a conversation with a longer request is left out.
        least_turns: a conversation with fewer requests is left out.
    """
    taken, requests = [], 0
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
    """Return all requests in the order of arrival, at equal times in the order of their conversations."""
    return sorted((turn for turns in conversations for turn in turns), key=lambda turn: turn.arrival_s)


def first_whole(requests: Sequence[WorkloadRequest], count: int) -> list[WorkloadRequest]:
    """Return the first conversations that have ``count`` requests together, whole, in the order of arrival.

    Args:
        requests: in the order of arrival; those that name no conversation stand alone.
        count: of requests, at least, if there are as many.
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
    """How many leading blocks all requests share."""
    if len(requests) < 2:
        return 0
    common = requests[0].prefix_blocks
    for request in requests[1:]:
        pairs = enumerate(zip(common, request.prefix_blocks, strict=False))
        shorter = min(len(common), len(request.prefix_blocks))
        common = common[: next((place for place, (one, other) in pairs if one != other), shorter)]
    return len(common)
