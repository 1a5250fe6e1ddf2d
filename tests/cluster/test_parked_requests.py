"""Requests whose server was lost, found by what their clients send again."""

import msgspec
import pytest

from lorikeet.cluster.controller.parked_requests import PARKED_S, ParkedRequests, resumed
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.request import Pooling, Request, SamplingParams
from tests.support.scripted import adapter

R5 = ReplicaId("replica-5")
PARKED = Request(
    RequestId("my-id-0011-0"), [1, 2, 3], SamplingParams(9, seed=7), 0.0, output_token_ids=[4, 5], exports=1
)
AGAIN = Request(RequestId("my-id-aabb-0"), [1, 2, 3], SamplingParams(9, seed=8), 5.0)


def changed(**changes: object) -> Request:
    return msgspec.structs.replace(AGAIN, **changes)


@pytest.fixture
def parked() -> ParkedRequests:
    made = ParkedRequests(lambda: 0.0)
    made.add([PARKED], R5)
    return made


def test_request_with_the_same_id_and_content_gets_tokens_and_seed(parked: ParkedRequests) -> None:
    assert parked.count_at(R5) == 1
    found = parked.take(AGAIN)
    assert found is not None
    assert found.replica == R5
    request = resumed(AGAIN, found.request)
    assert (request.request_id, request.output_token_ids, request.sampling.seed) == (AGAIN.request_id, [4, 5], 7)
    assert request.is_resumed
    assert parked.take(AGAIN) is None, "once"


@pytest.mark.parametrize(
    "other",
    [
        changed(request_id=RequestId("your-id-aabb-0")),
        changed(request_id=RequestId("my-id-aabb-1")),
        changed(prompt_token_ids=[1, 2, 4]),
        changed(sampling=SamplingParams(10)),
        changed(sampling=SamplingParams(9, logprobs=1)),
        changed(tenant="another"),
        changed(cache_salt="salt"),
        changed(adapter=adapter("a")),
        changed(pooling=Pooling()),
    ],
    ids=lambda request: "",
)
def test_request_that_differs_starts_anew(parked: ParkedRequests, other: Request) -> None:
    assert parked.take(other) is None


def test_parked_requests_are_forgotten_after_a_while() -> None:
    now = 0.0
    parked = ParkedRequests(lambda: now)
    parked.add([PARKED], R5)
    now = PARKED_S + 1
    assert parked.take(AGAIN) is None
    assert not len(parked)
