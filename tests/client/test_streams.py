"""Streams of clients: outputs of earlier attempts are ignored."""

import msgspec
import pytest

from lorikeet.client.client import RequestHandle, Streams
from lorikeet.core.events import Finished, FinishReason, Queued, RequestEvent
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs, TokenOutput
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams

R = RequestId("r")
HERE, THERE = ReplicaId("here"), ReplicaId("there")
ENDED = Finished(R, 9.0, FinishReason.ABORT)


def opened() -> tuple[Streams, RequestHandle]:
    streams = Streams()
    request = Request(R, [1, 2], SamplingParams(max_tokens=99), 0.0)
    return streams, streams.open(request, lambda handle, is_complete: None)


def sent(handle: RequestHandle, replica: ReplicaId) -> Request:
    handle.replica = replica
    return handle.next_attempt()


def told(*events: RequestEvent, tokens: tuple[int, ...] = (), attempt: int = 0) -> StepOutputs:
    fresh = tuple(Token(100 + index) for index in tokens)
    return StepOutputs((TokenOutput(R, attempt, tokens[0], fresh),) if fresh else (), events, ())


def taken(streams: Streams, replica: ReplicaId, outputs: StepOutputs) -> StepOutputs:
    current = streams.without_stale(replica, outputs)
    streams.apply(current)
    return current


def test_the_first_attempt_is_the_request_itself() -> None:
    streams, handle = opened()
    assert sent(handle, HERE) == handle.request
    assert taken(streams, HERE, told(Queued(R, 1.0), tokens=(0, 1))).tokens
    assert handle.token_ids == [100, 101]
    again = sent(handle, THERE)
    assert (again.attempt, again.output_token_ids, again.is_resumed) == (1, [100, 101], True)
    assert not handle.request.is_resumed
    assert msgspec.structs.replace(handle.request, exports=1).is_resumed


@pytest.mark.parametrize("at_once", [True, False])
def test_returned_request_ignores_the_end_of_its_first_attempt(at_once: bool) -> None:
    streams, handle = opened()
    sent(handle, HERE)
    taken(streams, HERE, told(Queued(R, 1.0), tokens=(0,)))
    sent(handle, THERE)
    assert not taken(streams, HERE, told(tokens=(1,))).tokens, "it has left"
    sent(handle, HERE)
    past, present = told(ENDED, tokens=(2, 3)), told(Queued(R, 2.0, 2), tokens=(1, 2), attempt=2)
    if at_once:
        both = StepOutputs(past.tokens + present.tokens, past.events + present.events, ())
        assert taken(streams, HERE, both) == present
    else:
        assert taken(streams, HERE, past) == told()
        assert taken(streams, HERE, present) == present
    assert not taken(streams, THERE, told(Queued(R, 1.5, 1), ENDED, tokens=(1,), attempt=1)).events
    assert handle.token_ids == [100, 101, 102]
    streams.apply(streams.without_stale(HERE, told(ENDED)))
    assert R not in streams


def test_outputs_of_unplaced_or_ended_requests_are_stale() -> None:
    streams, handle = opened()
    sent(handle, HERE)
    taken(streams, HERE, told(Queued(R, 1.0)))
    handle.replica = None
    assert taken(streams, HERE, told(ENDED, tokens=(0,))) == told()
    streams.finish(handle, FinishReason.ABORT)
    assert taken(streams, HERE, told(ENDED, tokens=(0,))) == told()


def test_token_before_its_attempt_begins_is_an_error() -> None:
    streams, handle = opened()
    sent(handle, HERE)
    with pytest.raises(AssertionError, match="came early"):
        taken(streams, HERE, told(Queued(R, 1.0), tokens=(1,)))
