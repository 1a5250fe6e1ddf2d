"""Drafts come from the latest place that agrees, and stop where they fail."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.events import FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import PromptEmbeds
from lorikeet.scheduling.drafts import Drafter, NgramIndex
from lorikeet.scheduling.state import SchedulerLimits, Sequence
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request
from tests.support.scripted_executor import token_by_seed

MOST = 8


def sequence(name: str, prompt: list[int], output: list[int] = [], owner: str = "a", **sampling: object) -> Sequence:  # noqa: B006
    asked = request(name, prompt, adapter=adapter(owner), **{"max_tokens": 1000, **sampling})
    made = Sequence(asked, 0.0, len(prompt) + asked.sampling.max_tokens)
    made.token_ids += output
    return made


def verify(drafter: Drafter, running: Sequence, truth: list[int], cost: float = 0.1) -> None:
    """Write an answer by steps with drafts."""
    done = running.output_tokens
    while done < len(truth):
        draft = drafter.draft([running], 100, cost).get(running.request_id, ())
        assert len(draft) < running.tokens_left, "the step yields one token more than it drafts"
        kept = 0
        while kept < len(draft) and done + kept < len(truth) - 1 and draft[kept] == truth[done + kept]:
            kept += 1
        new = truth[done : done + kept + 1]
        known = len(running.token_ids)
        running.token_ids += new
        drafter.note(running, len(draft), kept, known)
        done += len(new)
    drafter.ended(running, will_resume=False)


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), min_size=3, max_size=8))
def test_the_latest_place_is_found_where_tokens_agree(text: list[int], tail: list[int]) -> None:
    index = NgramIndex()
    for token in text:
        index.extend([token])
    guess = index.guess(tail)
    for order in (3, 2, 1):
        places = [at for at in range(order, len(text)) if text[at - order : at] == tail[-order:]]
        if places:
            break
    followed = [text[at] for at in reversed(places)]
    repeated = next((at for at, token in enumerate(followed) if token != followed[0]), len(followed)) - 1
    if not places or (order == 1 and not repeated):
        assert guess is None
        return
    assert guess is not None
    assert (guess.token_id, guess.repeated) == (followed[0], repeated)
    before, agreeing = text[: places[-1]], guess.agreeing
    assert before[-agreeing:] == tail[-agreeing:]
    assert agreeing == min(12, len(tail), len(before)) or before[-1 - agreeing] != tail[-1 - agreeing]


def test_an_answer_that_repeats_an_earlier_one_takes_few_steps() -> None:
    drafter, truth = Drafter(MOST), random.Random(1).choices(range(1000), k=400)
    verify(drafter, sequence("first", [1, 2, 3]), truth)
    assert drafter.kept_tokens == 0
    verify(drafter, sequence("second", [4, 5, 6]), truth)
    assert drafter.kept_tokens > 300
    assert drafter.pays([sequence("third", [7])])
    assert not drafter.pays([sequence("other", [7], owner="b")])


def test_an_answer_that_repeats_its_prompt_takes_few_steps() -> None:
    drafter, truth = Drafter(MOST), random.Random(2).choices(range(1000), k=400)
    verify(drafter, sequence("edit", [1, 2, *truth]), truth)
    assert drafter.kept_tokens > 300


def test_short_answers_of_one_form_soon_take_half_the_steps() -> None:
    """As of JSON with the same keys: what differs is never drafted for long, what is the same always."""
    drafter, draw, steps, tokens = Drafter(MOST), random.Random(4), 0, 0
    for number in range(24):
        value, text = draw.choices(range(100, 1000), k=1), draw.choices(range(100, 1000), k=3)
        truth = [1, 2, 3, 4, *value, 5, 4, 6, 3, 4, *text, 7]
        before = drafter.kept_tokens
        verify(drafter, sequence(str(number), [8, 9, draw.randrange(100, 1000), 10, 11, 12]), truth)
        if number >= 4:
            tokens += len(truth)
            steps += len(truth) - (drafter.kept_tokens - before)
    assert tokens > 1.9 * steps
    assert drafter.drafted_tokens - drafter.kept_tokens <= 0.04 * tokens


def test_guesses_that_are_not_drafted_bring_drafts_back() -> None:
    drafter, draw = Drafter(MOST), random.Random(5)
    for number in range(20):  # each token has followed the one before it twice, and is then followed by another
        verify(drafter, sequence(f"bad {number}", [1, 2] * 20), draw.choices((1, 2), k=30))
    kept = drafter.kept_tokens
    verify(drafter, sequence("good", [1]), list(range(100, 160)) * 3)
    assert drafter.kept_tokens > kept + 80


def test_answers_that_repeat_little_have_few_drafts() -> None:
    """As in a text, a word is often followed by the same one, and mostly by another."""
    drafter, choose, tokens = Drafter(MOST), random.Random(3), 0
    for number in range(60):
        truth = [0]
        while len(truth) < 200:
            truth.append((truth[-1] * 7 + 3) % 60 if choose.random() < 0.3 else choose.randrange(60))
        verify(drafter, sequence(str(number), [1]), truth)
        tokens += len(truth)
    wrong = drafter.drafted_tokens - drafter.kept_tokens
    assert 0 < wrong <= 0.02 * tokens
    assert not drafter.pays([sequence("next", [1])])


def test_nothing_is_drafted_that_cannot_come() -> None:
    drafter, truth = Drafter(MOST), list(range(10, 100))
    verify(drafter, sequence("first", [1]), truth)
    known = truth[:20]
    assert drafter.draft([sequence("a", [1], known)], 100, 0.1)[RequestId("a")][0] == truth[20]
    stops = sequence("b", [1], known, stop_token_ids=(truth[20],))
    short = sequence("c", [1], known, max_tokens=21)
    no_budget = drafter.draft([sequence("d", [1], known)], 0, 0.1)
    unknown = sequence("e", [1], known)
    unknown.request = msgspec.structs.replace(unknown.request, prompt_embeds=PromptEmbeds("float32", b"\0" * 4))
    assert drafter.draft([stops, short, unknown], 100, 0.1) == no_budget == {}
    assert Drafter(0).draft([sequence("f", [1, *truth], known)], 100, 0.1) == {}


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 5, 50])
def test_answers_are_the_same_with_drafts_whatever_happens(period: int) -> None:
    """Requests come, end, are resumed and are preempted for lack of blocks; KV is what it must be at every step."""
    for seed in range(6):
        choose = random.Random(f"{period} {seed}")

        def script(start: SequenceStart, position: int) -> int:
            """A text that repeats itself, but for some places."""
            return position % period if hash((start.sampling.seed, position)) % 11 else token_by_seed(start, position)

        limits = SchedulerLimits(
            max_num_seqs=6, max_num_batched_tokens=24, max_model_len=96, num_scheduler_steps=3, max_draft_tokens=MOST
        )
        bench = Bench(blocks=40, limits=limits, script=script)
        asked = {}
        for number in range(14):
            prompt = [at % period for at in range(choose.randrange(2, 30))]
            owner = choose.choice([None, adapter("a"), adapter("b")])
            new = request(f"{number}", prompt, adapter=owner, max_tokens=choose.randrange(1, 50), seed=number)
            asked[new.request_id] = new
            bench.engine.submit(new)
            for _ in range(choose.randrange(4)):
                bench.step()
            live = [each for each in asked if each not in bench.finished()]
            if live and choose.random() < 0.3:
                bench.engine.submit(bench.engine.export_request(choose.choice(live)))
            elif live and choose.random() < 0.15:
                bench.engine.abort(choose.choice(live))
        bench.run()
        for request_id, ended in bench.finished().items():
            new, tokens = asked[request_id], bench.tokens.get(request_id, [])
            first = len(new.prompt_token_ids)
            start = SequenceStart(request_id, [], 0, new.sampling, None)
            assert tokens == [script(start, first + at) for at in range(len(tokens))]
            if ended.reason is not FinishReason.ABORT:
                assert len(tokens) == min(new.sampling.max_tokens, limits.max_model_len - first)
        drafter = bench.scheduler.drafter
        assert 0 < drafter.kept_tokens <= drafter.drafted_tokens
        assert all(plan.repeat == 1 for plan in bench.plans if any(step.draft for step in plan.sequences))
        assert not drafter._texts


def test_drafts_that_find_no_blocks_are_left_out() -> None:
    bench = Bench(
        blocks=6,
        limits=SchedulerLimits(4, 16, 6 * BLOCK_TOKENS, max_draft_tokens=MOST),
        script=lambda start, position: position % 2,
    )
    bench.engine.submit(request("a", [0, 1, 0, 1, 0, 1, 0], max_tokens=17))
    bench.run()
    assert bench.tokens[RequestId("a")] == [(7 + at) % 2 for at in range(17)]
    assert bench.scheduler.drafter.kept_tokens > 0
    assert bench.scheduler.preemptions == 0
