"""Tests of outputs that are passed on in parts."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from lorikeet.client.backlog import Backlog
from lorikeet.core.events import AdapterEvicted, Finished, FinishReason, FirstToken
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import EngineStats, ExportedKv, StepOutputs, TokenOutput
from lorikeet.core.plan import Pooled, PromptLogprobs, Token

ids = [RequestId(name) for name in "abcdefgh"]


def tokens(request_id: RequestId, index: int, *token_ids: int, attempt: int = 0) -> TokenOutput:
    return TokenOutput(request_id, attempt, index, tuple(Token(each) for each in token_ids))


@given(
    st.lists(st.tuples(st.sets(st.sampled_from(ids), min_size=1), st.integers(0, 3)), max_size=12), st.integers(1, 5)
)
def test_each_request_gets_all_its_tokens_in_order_in_parts_of_few_requests(
    steps: list[tuple[set[RequestId], int]], most: int
) -> None:
    backlog, sent, got = Backlog(), dict.fromkeys(ids, 0), {each: list[int]() for each in ids}

    def take() -> None:
        part = backlog.take(most)
        assert 0 < len(part.tokens) <= most
        for each in part.tokens:
            assert each.index == len(got[each.request_id])
            got[each.request_id] += [token.token_id for token in each.tokens]

    for of_step, parts in steps:
        backlog.add(StepOutputs(tuple(tokens(each, sent[each], sent[each]) for each in sorted(of_step)), (), ()))
        for each in of_step:
            sent[each] += 1
        for _ in range(parts):
            if backlog:
                take()
    while backlog:
        take()
    assert got == {each: [*range(count)] for each, count in sent.items()}


def test_requests_with_events_go_first_with_their_tokens() -> None:
    backlog = Backlog()
    backlog.add(StepOutputs(tuple(tokens(each, 0, 1) for each in ids), (), ()))
    events = (
        FirstToken(ids[7], 0.0),
        Finished(ids[6], 0.0, FinishReason.LENGTH),
        Finished(ids[7], 1.0, FinishReason.STOP),
    )
    backlog.add(StepOutputs((tokens(ids[7], 1, 2),), events, ()))
    part = backlog.take(3)
    assert part.events == (events[0], events[2], events[1])
    assert part.tokens == (tokens(ids[7], 0, 1, 2), tokens(ids[6], 0, 1), tokens(ids[0], 0, 1))
    assert [each.request_id for each in backlog.take(8).tokens] == ids[1:6]
    assert not backlog


def test_kv_and_adapters_come_after_tokens_and_vectors_before_them() -> None:
    backlog = Backlog()
    exported = ExportedKv(ids[0], (), ())
    evicted = AdapterEvicted(AdapterDigest("d"), 0.0, 0)
    logprobs, vector = PromptLogprobs(ids[3], 0, ()), Pooled(ids[2], b"")
    backlog.add(StepOutputs(tuple(tokens(each, 0, 1) for each in ids[:3]), (), ()))
    backlog.add(
        StepOutputs(
            (tokens(ids[0], 1, 2), tokens(ids[3], 0, 1)),
            (),
            (evicted,),
            exported_kv=(exported,),
            prompt_logprobs=(logprobs,),
            pooled=(vector,),
        )
    )
    backlog.add(StepOutputs((tokens(ids[4], 0, 1),), (), ()))
    first, second, third = backlog.take(2), backlog.take(3), backlog.take(3)
    assert (first.prompt_logprobs, first.pooled) == ((logprobs,), (vector,))
    assert first.tokens == (tokens(ids[0], 0, 1, 2), tokens(ids[1], 0, 1))
    assert (second.exported_kv, second.adapter_events) == ((exported,), (evicted,))
    assert (first.exported_kv, first.adapter_events) == ((), ())
    assert [each.request_id for each in second.tokens] == ids[2:4]
    assert [each.request_id for each in third.tokens] == [ids[4]]
    assert not backlog


def test_stats_come_after_the_events_before_them_and_not_after_later_ends() -> None:
    old, new = cast(EngineStats, object()), cast(EngineStats, object())
    end = Finished(ids[0], 0.0, FinishReason.LENGTH)
    backlog = Backlog()
    backlog.add(StepOutputs(tuple(tokens(each, 0, 1) for each in ids), (), (), stats=old))
    backlog.add(StepOutputs((), (end,), ()))
    assert backlog.take(1).stats is None, "they count the request that has ended since"
    backlog.add(StepOutputs((), (FirstToken(ids[1], 1.0), FirstToken(ids[2], 1.0)), (), stats=new))
    assert [backlog.take(1).stats for _ in range(3)] == [None, new, None]


def test_tokens_of_an_earlier_attempt_make_room_for_those_of_a_later_one() -> None:
    backlog = Backlog()
    backlog.add(StepOutputs((tokens(ids[0], 3, 1),), (), ()))
    backlog.add(StepOutputs((tokens(ids[0], 2, 5, attempt=1),), (), ()))
    assert backlog.take(1).tokens == (tokens(ids[0], 2, 5, attempt=1),)
