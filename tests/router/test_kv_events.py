"""Requests go where the blocks of their prompts are, by events that backends publish in vLLM's formats."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from lorikeet.core.ids import ReplicaId
from lorikeet.router.adapters import describe_adapter
from lorikeet.router.kv_index import KvIndex
from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.conftest import Routing, adapters, routing
from tests.router.scripted import ScriptedBackend
from tests.support.fakes import write_adapter
from tests.support.served import make_model, serving
from tests.support.waiting import until

A, B = ReplicaId("a"), ReplicaId("b")
SIZE = 4


def stored(hashes: list[Any], token_ids: list[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    chain = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids, "block_size": SIZE}
    return {"type": "BlockStored", **chain, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def test_index_finds_the_prefix_that_each_backend_has() -> None:
    index = KvIndex()
    prompt = list(range(12))
    index.apply(A, batch(stored([1, 2], prompt[:8]), stored([3], prompt[8:12], 2)))
    index.apply(B, batch(stored([b"x"], prompt[:4])))
    assert index.cached_tokens("", "", [*prompt, 99]) == {A: 12, B: 4}
    assert index.cached_tokens("", "", [7, *prompt]) == {A: 0, B: 0}
    assert index.cached_tokens("sql", "", prompt) == {A: 0, B: 0}, "another adapter's KV"
    assert index.cached_tokens("", "salt", prompt) == {A: 0, B: 0}, "another tenant's KV"
    index.apply(A, batch({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}))
    assert index.cached_tokens("", "", prompt) == {A: 8, B: 4}
    index.apply(A, batch({"type": "AllBlocksCleared"}))
    assert index.cached_tokens("", "", prompt) == {A: 0, B: 4}


def test_a_block_stays_while_a_medium_has_it() -> None:
    index = KvIndex()
    index.apply(A, batch(stored([1], [1, 2, 3, 4]), stored([1], [1, 2, 3, 4], medium="CPU")))
    for medium, tokens in (("GPU", 4), ("CPU", 0)):
        index.apply(A, batch({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}))
        assert index.cached_tokens("", "", [1, 2, 3, 4]) == {A: tokens}


def test_blocks_of_an_adapter_and_a_salt_are_its_own() -> None:
    index = KvIndex()
    chain = stored([1, 2], list(range(8)), lora_name="sql", lora_id=1, extra_keys=[["sql", "mine"], ["sql"]])
    index.apply(A, batch(chain))
    assert index.cached_tokens("sql", "mine", list(range(8))) == {A: 8}
    assert index.cached_tokens("sql", "", list(range(8))) == {A: 0}
    index.apply(B, batch(stored([1, 2], list(range(8)), extra_keys=[["key-05d07048\0mine"], None])))
    assert index.cached_tokens("", "mine", list(range(8))) == {A: 0, B: 8}, "a Lorikeet with keys names the tenant, too"


def test_events_as_arrays_are_those_of_older_versions_of_vllm() -> None:
    index = KvIndex()
    index.apply(
        A, batch(["BlockStored", [1, 2], None, list(range(8)), SIZE, None, "GPU"], ["BlockRemoved", [2], "GPU"])
    )
    assert index.cached_tokens("", "", list(range(8))) == {A: 4}
    index.apply(A, batch(["BlockStored", [5], None, [9, 9, 9, 9], SIZE, 3, "GPU"]))
    assert index.cached_tokens("", "", [9, 9, 9, 9]) == {A: 0}, "an adapter without a name"


def test_blocks_that_depend_on_more_or_whose_parents_are_unknown_are_left_out() -> None:
    index = KvIndex()
    index.apply(A, batch(stored([2], [1, 2, 3, 4], parent=77)))
    index.apply(A, batch(stored([3], [1, 2, 3, 4], extra_keys=[["image", "other"]])))
    assert index.cached_tokens("", "", [1, 2, 3, 4]) == {A: 0}
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}], 0])):
        with pytest.raises(ValueError, match="not a batch"):
            index.apply(A, wrong)


def test_a_prompt_that_was_just_sent_counts_until_its_events_arrive() -> None:
    now = [0.0]
    index = KvIndex(lambda: now[0])
    index.apply(A, batch(stored([1], [9, 9, 9, 9])))
    index.expect(A, "", "", list(range(8)))
    assert index.cached_tokens("", "", list(range(8))) == {A: 8}
    now[0] = 11.0
    assert index.cached_tokens("", "", list(range(8))) == {A: 0}


class Publisher:
    """Publishes events as vLLM does: numbered batches, and missed ones at a replay address."""

    def __init__(self) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self.ports = tuple(each.bind_to_random_port("tcp://127.0.0.1") for each in (self._pub, self._replay))
        self._kept: list[bytes] = []
        self.replays = 0
        self._task = asyncio.create_task(self._serve())

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Publish empty batches until a condition holds: their numbers show a new subscriber what it has missed."""

        async def publish_and_look() -> bool:
            await self.publish()
            return holds()

        await until(publish_and_look, what)

    async def publish(self, *events: Any, is_lost: bool = False) -> None:
        self._kept.append(batch(*events))
        if not is_lost:
            await self._pub.send_multipart([b"kv", (len(self._kept) - 1).to_bytes(8, "big"), self._kept[-1]])

    async def _serve(self) -> None:
        while True:
            sender, _, first = await self._replay.recv_multipart()
            self.replays += 1
            for at in range(int.from_bytes(first, "big"), len(self._kept)):
                await self._replay.send_multipart([sender, b"", b"kv", at.to_bytes(8, "big"), self._kept[at]])
            await self._replay.send_multipart([sender, b"", b"kv", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(linger=0)
        self._replay.close(linger=0)


@asynccontextmanager
async def publishing() -> AsyncIterator[tuple[Routing, list[Publisher]]]:
    """Run a router before two backends that publish events."""
    backends = [ScriptedBackend("a"), ScriptedBackend("b")]
    publishers = [Publisher() for _ in backends]
    for backend in backends:
        await backend.start()
    urls = [
        f"{backend.url},kv_events={each.ports[0]},kv_replay={each.ports[1]}"
        for backend, each in zip(backends, publishers, strict=True)
    ]
    try:
        async with routing(urls, backends, adapters=adapters("pirate"), preset="auto") as router:
            await router.up(2)
            yield router, publishers
    finally:
        for publisher in publishers:
            publisher.close()
        for backend in backends:
            await backend.kill()


def _has_blocks(index: KvIndex, replica: ReplicaId, count: int) -> bool:
    return index.blocks(replica) == count


async def test_requests_go_to_the_backend_that_reports_their_blocks() -> None:
    async with publishing() as (router, publishers):
        index = router.parts.backend_router.kv
        prompts = [[number] * 16 for number in range(6)]
        for number, prompt in enumerate(prompts):
            await publishers[number % 2].publish(stored([number * 10 + each for each in range(4)], prompt))
        for replica, publisher in zip(router.parts.backend_router.backends, publishers, strict=True):
            await publisher.until(partial(_has_blocks, index, replica, 12), "all blocks are known")
        for prompt in prompts:
            body = {"model": "base", "prompt": [*prompt, 1], "max_tokens": 1}
            await router.http.post(COMPLETIONS, json=body)
        sent = [[body["prompt"][0] for body in backend.bodies] for backend in router.backends]
        assert sent == [[0, 2, 4], [1, 3, 5]]


async def test_missed_events_are_replayed_and_a_restarted_publisher_clears() -> None:
    async with publishing() as (router, publishers):
        index = router.parts.backend_router.kv
        replica = next(iter(router.parts.backend_router.backends))
        publisher = publishers[0]
        await until(lambda: publisher.replays == 1, "the router has asked for earlier events")
        await publisher.publish(stored([1], [1, 2, 3, 4]), is_lost=True)
        await publisher.publish(stored([2], [5, 6, 7, 8], 1))
        await publisher.until(lambda: index.blocks(replica) == 2, "the lost batch was replayed")
        assert index.cached_tokens("", "", [*range(1, 9)])[replica] == 8
        publisher._kept.clear()
        await publisher.publish({"type": "AllBlocksCleared"})
        await publisher.publish(stored([7], [1, 2, 3, 4]))
        await publisher.until(lambda: index.blocks(replica) == 1, "the new publisher's blocks alone are known")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.mark.slow
async def test_requests_go_where_real_servers_have_their_blocks(tmp_path: Path) -> None:
    """The blocks come from requests that the router has not seen: texts, chats and token ids, base and adapter."""
    model = make_model(tmp_path / "tiny", positions=4096)
    write_adapter(tmp_path / "sources" / "one", layers=3, hidden=48)
    adapter = describe_adapter("one", str(tmp_path / "sources" / "one"))
    words = "hello world " * 120
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"model": "one", "prompt": f"{number} {words}"} if number % 2 else {"prompt": [number + 5] * 100})
        for number in range(6)
    ]
    asked += [(CHAT, {"messages": [{"role": "user", "content": f"{number} {words}"}]}) for number in (6, 7)]
    ports = [free_port() for _ in range(4)]
    async with AsyncExitStack() as stack:
        starting = []
        for name, events, replay in zip("ab", ports[:2], ports[2:], strict=True):
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
            config["replay_endpoint"] = f"tcp://*:{replay}"
            flags = ("--adapter-dir", str(tmp_path / "sources"), "--kv-events-config", json.dumps(config))
            starting.append(stack.enter_async_context(serving(model, tmp_path / name, *flags)))
        servers = await asyncio.gather(*starting)
        for server in servers:  # from where the router would load it, so that it counts as loaded
            load = {"lora_name": "one", "lora_path": str(tmp_path / "sources" / "one")}
            assert (await server.http.post("/v1/load_lora_adapter", json=load)).status_code == 200
        base = (await servers[0].http.get("/v1/models")).json()["data"][0]["id"]
        for number, (path, body) in enumerate(asked):
            at = servers[number // 2 % 2]
            body |= {"model": body.get("model", base), "max_tokens": 1}
            assert (await at.http.post(path, json=body)).status_code == 200
        urls = [
            f"{str(server.http.base_url).rstrip('/')},kv_events={events},kv_replay={replay}"
            for server, events, replay in zip(servers, ports[:2], ports[2:], strict=True)
        ]
        async with routing(urls, adapters=(adapter,), preset="auto") as router:
            await router.up(2)
            index = router.parts.backend_router.kv
            backends = router.parts.backend_router.backends
            await until(lambda: all(index.blocks(each) > 10 for each in backends), "events were replayed")
            for path, body in asked:
                reply = (await router.http.post(path, json=body)).json()
                usage = reply["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 40, (path, body)
