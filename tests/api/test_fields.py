"""The list of fields agrees with the bodies, and what no route supports is refused."""

from typing import Any

import pytest

from lorikeet.chat.protocol import _FIELDS, Body, ChatCompletionRequest, CompletionRequest
from tests.chat.embeds import saved, tensor
from tests.support.api_server import Running
from tests.support.chat_requests import MESSAGES
from tests.support.scripts import script

_PAGE = script("docs/make_api.py")
BOTH = _PAGE.BOTH
CHAT = _PAGE.CHAT
COMPLETIONS = _PAGE.COMPLETIONS
FIELDS = _PAGE.FIELDS

BODIES: dict[str, type[Body]] = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
EXAMPLES: dict[str, Any] = {
    "chat_template": "default",
    "documents": [],
    "model": "formal",
    "lora_path": "formal",
    "lora": [{"id": "formal", "scale": 0.5}],
    "merged_adapters": {"ids": ["formal"], "weights": [0.5]},
    "adapter_parameters": {"ids": []},
    "messages": MESSAGES,
    "prompt": ["a", "b"],
    "prompt_embeds": saved(tensor(2)),
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "min_tokens": 1,
    "ignore_eos": True,
    "n": 2,
    "best_of": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [3],
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 2},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["x"],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a", "b"]},
    "json_schema": '{"type": "object"}',
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "guided_whitespace_pattern": " ",
    "logprobs": {COMPLETIONS: 1, CHAT: True},
    "top_logprobs": 2,
    "logprob_token_ids": [1, 2],
    "prompt_logprobs": 1,
    "expect_digest": "ba5eba5e",
    "return_weight_versions": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "logprobs_mode": "processed_logprobs",
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "echo": True,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"x": 1},
    "continue_final_message": True,
    "priority": 1,
    "cache_salt": "x",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "thinking_token_budget": -1,
    "include_reasoning": False,
    "service_tier": "flex",
    "user": "x",
}
"""A value of every supported field."""
TOGETHER = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": {COMPLETIONS: 1, CHAT: True}},
    "guided_whitespace_pattern": {"guided_json": {"type": "object"}},
    "tools": {"tool_choice": "none"},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "continue_final_message": {"add_generation_prompt": False},
}
"""What some need beside them."""
NAMES = [name for field in FIELDS for name in field.names]


@pytest.mark.parametrize("route", BOTH)
def test_every_field_of_a_body_is_listed(route: str) -> None:
    listed = {name for field in FIELDS if route in field.routes for name in field.names}
    assert set(BODIES[route].model_fields) == listed


def test_no_field_is_listed_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_refused_fields_are_in_the_list_of_fields() -> None:
    assert set(_FIELDS) <= set(NAMES)


@pytest.mark.slow
async def test_fields_that_a_route_lacks_are_refused_or_have_no_effect(server: Running) -> None:
    """Those of the other route's own input, such as messages, have none."""
    for route in BOTH:
        own: dict[str, Any] = {"prompt": "a"} if route == COMPLETIONS else {"messages": MESSAGES}
        for name in (name for field in FIELDS if route not in field.routes for name in field.names):
            reply = await server.http.post(route, json={**own, name: {"odd": 1}})
            if name in _FIELDS:
                assert (reply.status_code, reply.json()["error"]["param"]) == (501, name)
            else:
                assert reply.status_code == 200, (route, name)


@pytest.mark.slow
async def test_every_supported_field_is_accepted_on_its_routes(server: Running) -> None:
    for route in BOTH:

        def value(given: Any, route: str = route) -> Any:
            return given[route] if isinstance(given, dict) and route in given else given

        prompts: dict[str, Any] = {"prompt": "a"} if route == COMPLETIONS else {"messages": MESSAGES}
        for name in (name for field in FIELDS if route in field.routes for name in field.names):
            own = {} if name == "prompt_embeds" else prompts
            beside = {key: value(given) for key, given in TOGETHER.get(name, {}).items()}
            reply = await server.http.post(route, json={**own, **beside, name: value(EXAMPLES[name])})
            assert reply.status_code == 200, (route, name, reply.text)


def test_every_supported_field_has_an_example() -> None:
    assert set(EXAMPLES) == {name for field in FIELDS if field.routes for name in field.names}
