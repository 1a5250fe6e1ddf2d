"""Bodies that are read in another process: the same answers as small ones get, and limits on what they cost."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorikeet.http import body_gate
from lorikeet.http.body_gate import SMALL_BODY_BYTES, BodyGate
from lorikeet.http.body_structure import BodyStructure, check_structure, count_structure
from lorikeet.http.errors import ApiError
from lorikeet.router.proxied_request import RequestBody
from lorikeet.serving import large_bodies
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.waiting import until

COMPLETIONS = "/v1/completions"
PADDING = {"user": "x" * SMALL_BODY_BYTES}
"""Makes a body large, and has no effect."""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{}", (1, 1, 0, 1)),
        (b'{"a": [1, 2, {"b": null}], "c": "x"}', (3, 3, 3, 6)),
        (rb'{"[{,:\\\"[": "\\\\", "d": ["\\\\\""]}', (2, 2, 2, 3)),
        (b'["[", "]]", "{"]', (1, 1, 0, 3)),
        (b"[" * 1000, (1000, 1000, 0, 1000)),
        (b"]" * 1000, (0, 0, 0, 0)),
        (b"[" * 2**18 + b"]", (2**18, 2**18, 0, 2**18)),
        (b'["' + b"x" * (2**18 - 3) + rb"\"[," + b'", {}]', (2, 2, 0, 3)),
        (b'["' + b"\\" * 2**18 + b'", []]', (2, 2, 0, 3)),
        (b"", (0, 0, 0, 0)),
    ],
)
def test_structure_is_counted_outside_strings(content: bytes, expected: tuple[int, ...]) -> None:
    assert count_structure(content) == expected


@pytest.mark.parametrize("limit", range(4))
def test_body_with_more_than_could_be_served_is_refused(limit: int) -> None:
    content = b'{"a": [1, 2, {"b": null}], "c": "x"}'
    most = BodyStructure(3, 3, 3, 6)
    check_structure(content, most)
    less = BodyStructure(*(count - (index == limit) for index, count in enumerate(most)))
    with pytest.raises(ApiError, match=r"at most \d are allowed"):
        check_structure(content, less)


HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "many prompts": (COMPLETIONS, lambda size: b'{"prompt": [%s[1]]}' % (b"[1]," * (size // 4))),
    "many messages": (CHAT, lambda size: b'{"messages": [%s{}]}' % (b'{"role":"user"},' * (size // 16))),
    "many keys": (CHAT, lambda size: b"{%s}" % b",".join(b'"%x":0' % i for i in range(size // 10))),
    "many tokens": (COMPLETIONS, lambda size: b'{"prompt": [%s1]}' % (b"1," * (size // 2))),
    "deep": (CHAT, lambda size: b'{"messages": %s' % (b"[" * size)),
    "a long text": (COMPLETIONS, lambda size: b'{"prompt": "%s"}' % (b"a z9" * (size // 4))),
    "a long text to tokenize": ("/tokenize", lambda size: b'{"prompt": "%s"}' % (b"a z9" * (size // 4))),
    "many tokens to decode": ("/detokenize", lambda size: b'{"tokens": [%s1]}' % (b"1," * (size // 2))),
    "another encoding": (CHAT, lambda size: ("[" * (size // 2)).encode("utf-16")),
}


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
async def test_hostile_bodies_are_refused_with_little_memory(server: Running) -> None:
    assert (await server.http.post(CHAT, json=body() | PADDING)).status_code == 200
    (pid,) = server.service.prompt_processes.pids
    before = peak_bytes(pid)
    for name, (path, make) in HOSTILE.items():
        headers = {"Content-Type": "application/json"}
        reply = await server.http.post(
            path, content=make(2**23 - 32 if name != "many keys" else 2**21), headers=headers
        )
        assert reply.status_code == 400, name
        assert peak_bytes(pid) - before < 64 * 2**20, name
    assert server.service.prompt_processes.pids == [pid]


SAME: list[tuple[str, dict[str, Any]]] = [
    (CHAT, body(max_tokens=3, temperature=0.5, stop=["zz"], seed=7, logit_bias={"5": 1.5}, top_k=3)),
    (CHAT, body(echo=True, messages=[{"role": "assistant", "content": "well, "}])),
    (CHAT, body(n=2, logprobs=True, top_logprobs=1)),
    (CHAT, body(messages=[{"role": "user", "content": "x" * 5000}])),
    (CHAT, body(messages=[])),
    (CHAT, body(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
    (CHAT, body(temperature="hot")),
    (CHAT, body(tools=[{"type": "function"}])),
    (CHAT, body(model="nobody")),
    (CHAT, body(max_tokens=100_000)),
    (CHAT, body(chat_template_kwargs={"add_generation_prompt": False})),
    (CHAT, body(user="\ud800")),
    (COMPLETIONS, {"model": "base", "prompt": "hello"}),
    (COMPLETIONS, {"model": "formal", "prompt": ["hello", "world"], "echo": True, "n": 2}),
    (COMPLETIONS, {"model": "base", "prompt": [[1, 2], [3]], "echo": True}),
    (COMPLETIONS, {"model": "base", "prompt": [1, 2, 3], "add_special_tokens": False}),
    (COMPLETIONS, {"model": "base", "prompt": []}),
    (COMPLETIONS, {"model": "base", "prompt": [10**6]}),
    (COMPLETIONS, {"model": "base", "prompt": "x", "logit_bias": {"nothing": 1}}),
    (COMPLETIONS, {"model": "base", "prompt": "x", "stream_options": {"include_usage": True}, "stream": False}),
    ("/tokenize", {"prompt": "hello world", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"model": "nobody", "prompt": "x"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/detokenize", {"tokens": [10**6]}),
]


@pytest.mark.slow
async def test_large_bodies_are_answered_as_small_ones(server: Running) -> None:
    for path, content in SAME:
        seen = []
        for padding in ({}, PADDING):
            asked = content | (padding if "user" not in content else {"pad": "x" * SMALL_BODY_BYTES} if padding else {})
            server.engine.submitted.clear()
            reply = await server.http.post(
                path, content=json.dumps(asked), headers={"Content-Type": "application/json"}
            )
            answer = {key: value for key, value in reply.json().items() if key not in ("id", "created")}
            requests = [
                (each.prompt_token_ids, each.sampling if "seed" in asked else None, each.adapter)
                for each in server.engine.submitted
            ]
            seen.append((reply.status_code, answer, requests))
        assert seen[0] == seen[1], (path, content)
    assert len(server.service.prompt_processes.pids) == 1


@pytest.mark.slow
async def test_large_body_may_come_in_chunks_and_must_say_that_it_is_json(server: Running) -> None:
    async def chunks(count: int) -> Any:
        yield json.dumps(body()).encode()[:-1] + b', "user": "'
        for _ in range(count):
            yield b"x" * 1000
        yield b'"}'

    for count in (1, 100):
        reply = await server.http.post(CHAT, content=chunks(count), headers={"Content-Type": "application/json"})
        assert reply.status_code == 200
        reply = await server.http.post(CHAT, content=chunks(count), headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415


@pytest.mark.slow
async def test_invalid_large_json_is_a_400_with_its_position(server: Running) -> None:
    content = b'{"messages":\n [%s}' % (b" " * SMALL_BODY_BYTES)
    reply = await server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert reply.json()["error"]["message"].endswith(f"at line 2, column {SMALL_BODY_BYTES + 3}.")


@pytest.mark.slow
async def test_process_that_ends_is_replaced(server: Running) -> None:
    large = body() | PADDING
    assert (await server.http.post(CHAT, json=large)).status_code == 200
    (pid,) = server.service.prompt_processes.pids
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}/exe"), "it is gone")
    replies = [(await server.http.post(CHAT, json=large)).status_code for _ in range(2)]
    assert replies[-1] == 200
    assert set(replies) <= {200, 413}, "its end may be seen only when it is asked"


@pytest.mark.slow
async def test_body_that_takes_too_long_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await server.http.post(CHAT, json=body() | PADDING)).status_code == 200
    monkeypatch.setattr(large_bodies, "_READ_S", 0.0)
    assert (await server.http.post(CHAT, json=body() | PADDING)).status_code == 413
    assert not server.service.prompt_processes.pids
    assert not server.service.body_gate.held_bytes


def test_router_counts_before_it_decodes() -> None:
    content = b'{"messages": [%s{}]}' % (b"{}," * 2**17)
    with pytest.raises(ApiError, match="arrays and objects"):
        RequestBody(CHAT, content)


async def test_other_routes_take_small_bodies_only(server: Running) -> None:
    reply = await server.http.post("/v1/load_lora_adapter", json={"lora_name": "x" * SMALL_BODY_BYTES})
    assert reply.status_code == 413


async def test_full_or_draining_server_reads_no_large_body(start: Start) -> None:
    async with start() as server:
        server.service.gate.draining = True
        assert (await server.http.post(CHAT, json=body() | PADDING)).status_code == 503
        assert not server.service.prompt_processes.pids


async def test_gate_lets_bodies_in_by_their_size_and_in_their_order() -> None:
    gate = BodyGate(10)
    entered = []
    leave = asyncio.Event()

    async def hold(name: str, size: int) -> None:
        async with gate.hold(size):
            entered.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(hold(*each)) for each in (("a", 30), ("b", 10), ("c", 10), ("d", 1))]
    await asyncio.sleep(0)
    assert entered == ["a", "b"]
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})
    assert entered == ["a", "b"], "d has no room either"
    leave.set()
    await asyncio.wait(tasks)
    assert entered == ["a", "b", "d"]
    assert gate.held_bytes == 0


async def test_body_that_finds_no_room_in_time_gets_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_gate, "_WAIT_S", 0.01)
    gate = BodyGate(10)
    async with gate.hold(40):
        with pytest.raises(ApiError) as refusal:
            async with gate.hold(1):
                pass
    assert refusal.value.status == 429
    assert gate.held_bytes == 0
    async with gate.hold(40):
        pass
