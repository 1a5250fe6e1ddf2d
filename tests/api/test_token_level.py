"""Token ids, log probabilities of prompts, restricted tokens, and prompts that are cut, over HTTP."""

from typing import Any

import pytest

from tests.support.api_server import END, TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, MESSAGES, events

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
PROMPT = TOKENIZER.encode("hello the ").ids
ANSWER = TOKENIZER.encode("hello world").ids


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "hello the ", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": MESSAGES, **fields}


async def ask(server: Running, url: str, asked: dict[str, Any]) -> Any:
    reply = await server.http.post(url, json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_prompt_is_scored_without_an_answer(server: Running) -> None:
    asked = completion(echo=True, max_tokens=0, logprobs=1)
    answer = await ask(server, COMPLETIONS, asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello the ", "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(-float(at) for at in range(1, len(PROMPT)))]
    assert "".join(logprobs["tokens"]) == "hello the "
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * (len(PROMPT) - 1)
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:at])) for at in range(len(PROMPT))]
    assert answer["usage"]["completion_tokens"] == 0
    assert server.engine.submitted[-1].sampling.max_tokens == 1
    chunks = await events(server.http, COMPLETIONS, asked)
    assert chunks[0]["choices"][0]["logprobs"] == logprobs
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello the "


async def test_an_echo_and_the_answer_are_scored_as_one_text(server: Running) -> None:
    asked = completion(echo=True, logprobs=0)
    logprobs = (await ask(server, COMPLETIONS, asked))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(PROMPT) + len(ANSWER) + 1
    assert "".join(logprobs["tokens"][:-1]) == "hello the hello world"
    assert logprobs["text_offset"][len(PROMPT)] == len("hello the ")
    chunks = [chunk["choices"][0]["logprobs"] for chunk in await events(server.http, COMPLETIONS, asked)]
    for name, whole in logprobs.items():
        assert [entry for each in chunks for entry in each[name]] == whole


async def test_prompt_logprobs_have_vllms_form(server: Running) -> None:
    for asked, url in ((completion(prompt_logprobs=1, n=2), COMPLETIONS), (chat(prompt_logprobs=1), CHAT)):
        answer = await ask(server, url, asked)
        prompt = server.engine.submitted[-1].prompt_token_ids
        for holder in answer["choices"] if url == COMPLETIONS else [answer]:
            first, *others = holder["prompt_logprobs"]
            assert first is None
            assert len(others) == len(prompt) - 1
            own = others[0][str(prompt[1])]
            assert own == {"logprob": -1.0, "rank": 2, "decoded_token": TOKENIZER.decode([prompt[1]])}
            assert others[0]["7"]["rank"] == 1 or prompt[1] == 7
        refused = await server.http.post(url, json={**asked, "stream": True, "n": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_token_ids_are_returned_on_request(server: Running) -> None:
    ids = [*ANSWER, END]
    (choice,) = (await ask(server, COMPLETIONS, completion(return_token_ids=True)))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT, ids)
    answer = await ask(server, CHAT, chat(return_token_ids=True))
    prompt = server.engine.submitted[-1].prompt_token_ids
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, ids)
    chunks = [
        chunk["choices"][0] for chunk in await events(server.http, COMPLETIONS, completion(return_token_ids=True))
    ]
    assert [each.get("prompt_token_ids") for each in chunks] == [PROMPT, *[None] * (len(chunks) - 1)]
    assert [token_id for each in chunks for token_id in each["token_ids"]] == ids
    first, *others = await events(server.http, CHAT, chat(return_token_ids=True))
    assert first["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in each for each in others)
    assert [token_id for each in others for token_id in each["choices"][0]["token_ids"]] == ids


async def test_fields_that_are_not_requested_are_null(server: Running) -> None:
    answer = await ask(server, CHAT, chat())
    for name in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert answer[name] is None
    assert answer["choices"][0]["token_ids"] is None
    assert all("prompt_token_ids" not in each for each in await events(server.http, CHAT, chat()))


@pytest.mark.parametrize("by_flag", [False, True])
async def test_tokens_are_named_by_their_ids(start: Start, by_flag: bool) -> None:
    fields = {} if by_flag else {"return_tokens_as_token_ids": True}
    names = [f"token_id:{each}" for each in [*ANSWER, END]]
    async with start(return_tokens_as_token_ids=by_flag) as server:
        logprobs = (await ask(server, COMPLETIONS, completion(logprobs=1, **fields)))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == names
        assert [next(iter(top)) for top in logprobs["top_logprobs"]] == names
        asked = chat(logprobs=True, top_logprobs=1, **fields)
        content = (await ask(server, CHAT, asked))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == names
        no = {**asked, "return_tokens_as_token_ids": False}
        content = (await ask(server, CHAT, no))["choices"][0]["logprobs"]["content"]
        assert content[0]["token"] == TOKENIZER.decode(ANSWER[:1])


async def test_tokens_are_restricted(server: Running) -> None:
    await ask(server, COMPLETIONS, completion(allowed_token_ids=[5, 9, 5], bad_words=["world", " zq"], logprobs=2))
    params = server.engine.submitted[-1].sampling
    assert params.allowed_token_ids == (5, 9)
    plain = tuple(TOKENIZER.encode("world").ids)
    spaced = tuple(TOKENIZER.encode(" world").ids)
    assert params.bad_words[0] == plain
    assert (spaced in params.bad_words) == (len(spaced) == len(plain) and spaced[0] != plain[0])
    assert tuple(TOKENIZER.encode("zq").ids) in params.bad_words
    await ask(server, CHAT, chat(logprobs=True, logprob_token_ids=[3, 4]))
    assert server.engine.submitted[-1].sampling.logprob_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 70_000}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0}, "logprob_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_invalid_token_level_fields_are_a_400(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = await server.http.post(COMPLETIONS, json=completion(**fields))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert reply.headers["x-should-retry"] == "false"
    assert server.service.gate.active == 0


async def test_the_best_answers_are_those_with_the_highest_mean(server: Running) -> None:
    asked = completion(prompt=["a", "b"], n=2, best_of=3)
    answer = await ask(server, COMPLETIONS, asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert [request.sampling.logprobs for request in server.engine.submitted] == [0] * 6
    assert len({request.sampling.seed for request in server.engine.submitted[:3]}) == 3
    assert answer["usage"]["completion_tokens"] == 6 * (len(ANSWER) + 1)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, PROMPT[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, PROMPT[:3]),
        ({"truncate_prompt_tokens": 300}, PROMPT),
        ({"truncate_prompt_tokens": -1, "max_tokens": 250}, PROMPT[-6:]),
    ],
)
async def test_prompts_are_cut(server: Running, fields: dict[str, Any], kept: list[int]) -> None:
    answer = await ask(server, COMPLETIONS, completion(echo=True, **fields))
    assert server.engine.submitted[-1].prompt_token_ids == kept
    assert answer["choices"][0]["text"].startswith(TOKENIZER.decode(kept))
    await ask(server, CHAT, chat(**fields))
    assert len(server.engine.submitted[-1].prompt_token_ids) <= 300


async def test_a_prompt_far_beyond_the_context_is_cut_in_bodies_of_any_size(server: Running) -> None:
    for times in (2_000, 20_000):
        await ask(server, COMPLETIONS, completion(prompt="hello the " * times, truncate_prompt_tokens=10, echo=True))
        assert len(server.engine.submitted[-1].prompt_token_ids) == 10


async def test_a_server_may_allow_all_logprobs(start: Start) -> None:
    async with start() as server:
        base = server.service.chats.base
        object.__setattr__(
            base, "limits", base.limits.__class__(256, TOKENIZER.get_vocab_size(), (END,), max_logprobs=-1)
        )
        await ask(server, CHAT, chat(logprobs=True, top_logprobs=-1, max_tokens=2))
        assert server.engine.submitted[-1].sampling.logprobs == TOKENIZER.get_vocab_size()
