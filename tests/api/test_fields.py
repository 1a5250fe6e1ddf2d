"""The list of fields agrees with the bodies, and what no route supports is refused."""

from typing import Any

import pytest

from lorikeet.api.fields import BOTH, CHAT, COMPLETIONS, FIELDS
from lorikeet.api.protocol import _FIELDS, Body, ChatCompletionRequest, CompletionRequest
from tests.api.conftest import Running
from tests.api.test_chat import MESSAGES

BODIES: dict[str, type[Body]] = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
NAMES = [name for field in FIELDS for name in field.names]


@pytest.mark.parametrize("route", BOTH)
def test_every_field_of_a_body_is_listed(route: str) -> None:
    listed = {name for field in FIELDS if route in field.routes for name in field.names}
    assert set(BODIES[route].model_fields) == listed


def test_no_field_is_listed_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_what_is_refused_is_listed() -> None:
    assert set(_FIELDS) <= set(NAMES)


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for field in FIELDS for name in field.names for route in BOTH if route not in field.routes],
)
async def test_fields_that_a_route_lacks_are_refused_or_have_no_effect(server: Running, route: str, name: str) -> None:
    """Those of the other route's own input, such as messages, have none."""
    own: dict[str, Any] = {"prompt": "a"} if route == COMPLETIONS else {"messages": MESSAGES}
    reply = await server.http.post(route, json={**own, name: {"odd": 1}})
    if name in _FIELDS:
        assert reply.status_code == 501
        assert reply.json()["error"]["param"] == name
    else:
        assert reply.status_code == 200
