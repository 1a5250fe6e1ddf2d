"""How many answers are stored, and for how long."""

import contextlib
import json

import pytest

from lorikeet.api.errors import ApiError
from lorikeet.api.responses_body import joined
from lorikeet.api.stored_responses import StoredResponse, StoredResponses


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(name, b"x" * size, b"")


def kept(store: StoredResponses, tenant: str, names: str) -> str:
    """Return which of the names are there."""
    found = ""
    for name in names:
        with contextlib.suppress(ApiError):
            found += store.get(tenant, name).response_id
    return found


def test_oldest_are_dropped_beyond_a_number() -> None:
    store = StoredResponses(3, 1000, 60)
    for name in "abcde":
        store.put("t", stored(name))
    assert kept(store, "t", "abcde") == "cde"
    assert (store.number, store.size_bytes) == (3, 30)


def test_tenant_with_the_most_bytes_makes_room() -> None:
    store = StoredResponses(100, 100, 60)
    store.put("small", stored("a"))
    for name in "bcdef":
        store.put("large", stored(name, 25))
    assert kept(store, "small", "a") == "a"
    assert kept(store, "large", "bcdef") == "def"
    store.put("small", stored("g", 101))
    assert kept(store, "small", "ag") == "a"


def test_answers_are_dropped_after_their_time() -> None:
    clock = Clock()
    store = StoredResponses(10, 1000, 60, clock)
    store.put("t", stored("a"))
    clock.now_s = 50
    store.put("t", stored("b"))
    clock.now_s = 61
    assert kept(store, "t", "ab") == "b"
    clock.now_s = 200
    assert kept(store, "t", "ab") == ""
    assert (store.number, store.size_bytes) == (0, 0)


def test_answers_that_are_being_made_stay() -> None:
    store = StoredResponses(1, 1000, 60)
    running = stored("a")
    running.snapshot = bytes
    store.put("t", running)
    store.put("t", stored("b"))
    assert kept(store, "t", "ab") == "a"
    running.response, running.snapshot = b"x" * 20, None
    store.put("t", running)
    assert (store.number, store.size_bytes) == (1, 30)


def test_tenants_do_not_see_each_other() -> None:
    store = StoredResponses(10, 1000, 60)
    store.put("t", stored("a"))
    assert kept(store, "u", "a") == ""
    store.delete("u", "a")
    assert kept(store, "t", "a") == "a"


def test_conversation_ends_with_the_answer() -> None:
    store = StoredResponses(10, 1000, 60)
    store.put("t", StoredResponse("a", b"[1]", b'{"status":"completed","output":[2,3]}'))
    store.put("t", StoredResponse("b", b"[1]", b'{"status":"failed","output":[]}'))
    assert json.loads(store.conversation("t", "a")) == [1, 2, 3]
    assert store.conversation("t", None) == b""
    with pytest.raises(ApiError, match="is failed"):
        store.conversation("t", "b")


def test_arrays_are_joined() -> None:
    assert joined(b"", b"[]", b"[1]", b"[2,3]") == b"[1,2,3]"
