"""How long a request waits for its adapter's room, and so who may pass it meanwhile (section 7 of the spec)."""

from collections import Counter
from collections.abc import Iterable, Mapping

from lorikeet.core.ids import RequestId
from lorikeet.scheduling.admission import EngineView, Running


def wait_in_steps(
    needed_tokens: int,
    free_tokens: int,
    running: Iterable[Running],
    expected_tokens: Mapping[RequestId, int],
    view: EngineView,
) -> float:
    """Return after how many steps there will be room, if all running requests end as expected; infinite if never.

    Each frees its KV when it ends, and its adapter's room when it is the last under it.

    Args:
        needed_tokens: of room.
        free_tokens: that there are now.
        running: who runs.
        expected_tokens: of their whole answers.
        view: tells what adapters take.
    """
    if needed_tokens <= free_tokens:
        return 0
    running = list(running)
    users = Counter(each.request.digest for each in running)
    left = [(max(1, expected_tokens[each.request.request_id] - each.output_tokens), each) for each in running]
    for steps, each in sorted(left, key=lambda pair: pair[0]):
        users[each.request.digest] -= 1
        free_tokens += each.kv_tokens
        free_tokens += 0 if users[each.request.digest] else view.adapter_tokens(each.request.adapter)
        if needed_tokens <= free_tokens:
            return steps
    return float("inf")
