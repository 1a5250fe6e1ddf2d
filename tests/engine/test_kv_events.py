"""Events of KV: a subscriber that knows only vLLM's documentation rebuilds the cached blocks of an engine."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import zmq

from lorikeet.config import ConfigError, KvEventSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.engine.kv_publisher import KvPublisher
from lorikeet.memory.kv_events import BlockTokens, KvEvent, KvEvents
from lorikeet.memory.tree import DependencyTree, NodeKind, block_keys
from lorikeet.presets import PRESETS
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

Content = tuple[str | None, tuple[int, ...], str]
"""What a block stands for: the adapter's name, all tokens from the start of the prompt, and the cache salt."""


class Blocks:
    """The blocks that events describe, by medium."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.events = 0

    def apply(self, batch: list[Any]) -> None:
        _, events, _ = batch
        self.events += len(events)
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.held = {"GPU": set(), "CPU": set()}
                case "BlockRemoved":
                    for each in event["block_hashes"]:
                        self.held[event["medium"]].remove(each)
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size = event["block_size"]
        name = event["lora_name"]
        parent = event["parent_block_hash"]
        extra = event["extra_keys"] or [None] * len(event["block_hashes"])
        before: tuple[int, ...] = ()
        salt = "".join(each for each in extra[0] or () if each != name) if parent is None else ""
        if parent is not None:
            _, before, salt = self.contents[parent]
        for index, (each, keys) in enumerate(zip(event["block_hashes"], extra, strict=True)):
            before += tuple(event["token_ids"][index * size : (index + 1) * size])
            assert (name is not None) == (name in (keys or ()))
            self.contents[each] = name, before, salt
            assert each not in self.held[event["medium"]]
            self.held[event["medium"]].add(each)

    def found(self, medium: str) -> set[Content]:
        return {self.contents[each] for each in self.held[medium]}


def events_of(kv: KvEvents) -> list[KvEvent]:
    """Return the events since the last call, as they are published."""
    return [event for change in kv.take() for event in change.events(BLOCK_TOKENS)]


class Subscriber:
    """Reads events, loses some, and asks for those that it missed.

    Args:
        events, replay: addresses of the publisher.
        loses: share of the messages that it loses.
    """

    def __init__(self, events: str, replay: str, loses: float) -> None:
        context = zmq.Context.instance()
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(events)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod@base")
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._loses = loses
        self._random = random.Random(5)
        self._next = 0
        self.lost = 0
        self.blocks = Blocks()

    def read(self) -> None:
        """Read what has arrived."""
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            assert topic == b"kv@pod@base"
            if self._random.random() < self._loses:
                self.lost += 1
                continue
            if int.from_bytes(number, "big") > self._next:
                self.catch_up()
            if int.from_bytes(number, "big") == self._next:
                self._apply(payload)

    def catch_up(self) -> None:
        """Ask for all batches from the first missing one on."""
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(10_000), "the publisher answers"
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            assert int.from_bytes(number, "big") == self._next
            self._apply(payload)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._replay.close(linger=0)

    def _apply(self, payload: bytes) -> None:
        self.blocks.apply(msgspec.msgpack.decode(payload))
        self._next += 1


class Sockets(NamedTuple):
    publisher: KvPublisher
    subscriber: Subscriber


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    addresses = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    publisher = KvPublisher(KvEventSettings(*addresses, topic="kv@pod@base"), BLOCK_TOKENS)
    subscriber = Subscriber(*addresses, loses=0.01)
    yield Sockets(publisher, subscriber)
    subscriber.close()
    publisher.close()


class Server:
    """An engine whose adapters, names and requests change at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        tokens = BlockTokens(BLOCK_TOKENS)
        self.bench = Bench(blocks=48, host_blocks=24, preset=PRESETS["lorikeet:auto"], block_tokens=tokens)
        self.kv = KvEvents(self.bench.memory.tree, tokens)
        self.names: dict[AdapterName, AdapterRef] = {}
        self.sequences: dict[RequestId, tuple[AdapterRef | None, list[int], str, int]] = {}
        self._versions = 0
        self._requests = 0

    def change(self) -> None:
        """Do one thing at random, then run a turn."""
        match self.random.choices(["ask", "add", "replace", "remove", "abort", ""], [40, 2, 1, 1, 4, 30])[0]:
            case "ask":
                self._ask()
            case "add" if len(self.names) < 8:
                name = AdapterName(f"name-{self.random.randrange(9)}")
                others = list(self.names.values())
                self._name(name, self.random.choice(others) if others and self.random.random() < 0.3 else self._new())
            case "replace" if self.names:
                self._name(self.random.choice(list(self.names)), self._new())
            case "remove" if self.names:
                self._name(self.random.choice(list(self.names)), None)
            case "abort" if self.sequences:
                self.bench.engine.abort(self.random.choice(list(self.sequences)))
        self.bench.step()

    def contents(self, medium: str) -> set[Content]:
        """What the tree holds, spelled out: from the keys of everything that was ever sent."""
        tree = self.bench.memory.tree
        there = tree.on_device if medium == "GPU" else tree.on_host
        held = {tree.key_of(node) for node in np.flatnonzero(there & (tree.kind == NodeKind.KV)).tolist()}
        by_digest: dict[AdapterDigest, list[str]] = {}
        for name, ref in self.names.items():
            by_digest.setdefault(ref.digest, []).append(name)
        found: set[Content] = set()
        seen = set()
        for request_id, (ref, prompt, salt, start) in self.sequences.items():
            token_ids = prompt + self.bench.tokens.get(request_id, [])
            keys = block_keys(ref and ref.digest, token_ids, BLOCK_TOKENS, salt=salt, start=start)
            for index, key in enumerate(keys, 1):
                of_base = ref is None or index <= start // BLOCK_TOKENS
                if key in held:
                    seen.add(key)
                    named = [None] if of_base or ref is None else by_digest.get(ref.digest, [])
                    found |= {(name, tuple(token_ids[: index * BLOCK_TOKENS]), salt) for name in named}
        assert seen == held
        return found

    def _new(self) -> AdapterRef:
        self._versions += 1
        return adapter(f"version-{self._versions}", self.random.randint(1, 3))

    def _name(self, name: AdapterName, ref: AdapterRef | None) -> None:
        old = self.names.pop(name, None)
        if ref is not None:
            self.names[name] = ref
            self.bench.engine.register_adapters((ref,))
        self.kv.set_names({each: its.digest for each, its in self.names.items()})
        if old is not None and old.digest not in {each.digest for each in self.names.values()}:
            self.bench.engine.drop_adapter(old.digest)

    def _ask(self) -> None:
        self._requests += 1
        ref = self.random.choice([None, *self.names.values()])
        subject = self.random.randrange(4)
        prompt = [subject * 100 + index for index in range(self.random.randint(3, 30))]
        salt = self.random.choice(["", "", "tenant"])
        start = self.random.choice([0, 0, 9]) if ref is not None and len(prompt) > 10 else 0
        asked = request(f"r{self._requests}", prompt, self.bench.clock.now(), ref, max_tokens=self.random.randint(1, 9))
        asked = msgspec.structs.replace(asked, cache_salt=salt, adapter_start=start)
        self.sequences[asked.request_id] = ref, prompt, salt, start
        self.bench.engine.submit(asked)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4))])
def test_subscriber_that_loses_messages_rebuilds_the_cached_blocks(sockets: Sockets, seed: int) -> None:
    server = Server(seed)
    publisher, subscriber = sockets
    while subscriber.blocks.events < 10_000 or not server.bench.scheduler.preemptions:
        for _ in range(50):
            server.change()
            publisher.publish(server.kv.take())
        publisher.flush()
        subscriber.read()
    subscriber.catch_up()
    assert subscriber.lost
    for medium in ("GPU", "CPU"):
        assert subscriber.blocks.found(medium) == server.contents(medium)
    assert len(server.contents("GPU")) > 10


def test_a_replaced_name_loses_its_blocks_and_a_second_name_gets_them() -> None:
    tokens = BlockTokens(BLOCK_TOKENS)
    bench = Bench(block_tokens=tokens)
    kv = KvEvents(bench.memory.tree, tokens)
    blocks = Blocks()

    def take() -> set[str | None]:
        blocks.apply([0.0, msgspec.to_builtins(events_of(kv)), 0])
        return {name for name, *_ in blocks.found("GPU")}

    one, two = adapter("one"), adapter("two")
    kv.set_names({AdapterName("a"): one.digest})
    bench.engine.submit(request("r", list(range(9)), adapter=one))
    bench.run()
    assert take() == {"a"}
    kv.set_names({AdapterName("a"): one.digest, AdapterName("b"): one.digest})
    assert take() == {"a", "b"}
    kv.set_names({AdapterName("a"): two.digest, AdapterName("b"): one.digest})
    assert take() == {"b"}
    kv.set_names({AdapterName("a"): two.digest})
    assert take() == set()


def test_a_reset_of_the_prefix_cache_clears_blocks_and_hides_its_salt() -> None:
    tokens = BlockTokens(BLOCK_TOKENS)
    bench = Bench(block_tokens=tokens)
    kv = KvEvents(bench.memory.tree, tokens)
    blocks = Blocks()

    def take(name: str, salt: str) -> set[str]:
        asked = request(name, list(range(9)), bench.clock.now())
        bench.engine.submit(msgspec.structs.replace(asked, cache_salt=salt))
        bench.run()
        blocks.apply([0.0, msgspec.to_builtins(events_of(kv)), 0])
        return {salt for *_, salt in blocks.found("GPU")}

    assert take("a", "") == {""}
    assert take("b", "\0mine") == {"", "mine"}
    kv.set_names({}, "epoch")
    assert take("c", "") == set(), "a request from before the reset"
    assert take("d", "epoch\0") == {""}
    assert take("e", "epoch\0\0mine") == {"", "mine"}
    assert not kv.take()


def test_kv_of_another_engine_is_reported_once_its_tokens_are_known() -> None:
    tokens = BlockTokens(BLOCK_TOKENS)
    tree = DependencyTree()
    kv = KvEvents(tree, tokens)
    kv.take()
    asked = request("r", list(range(8)))
    keys = block_keys(None, asked.prompt_token_ids, BLOCK_TOKENS)
    ((first, second),) = tree.add_kv([0], [keys], 0.0)
    tree.on_host[[first, second]] = True
    assert not kv.take()
    kv.learn(asked)
    (stored,) = events_of(kv)
    assert msgspec.to_builtins(stored)["token_ids"] == asked.prompt_token_ids
    assert msgspec.to_builtins(stored)["medium"] == "CPU"


@pytest.mark.parametrize("endpoint", ["tcp://*:x", "nowhere"])
def test_address_that_is_not_valid_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv_events: "):
        KvPublisher(KvEventSettings(endpoint), BLOCK_TOKENS)


def test_replicas_publish_on_ports_of_their_own_and_a_port_in_use_is_named() -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://*")
        with pytest.raises(ConfigError, match=f"{port}: Address already in use"):
            KvPublisher(KvEventSettings(f"tcp://*:{port - 3}"), BLOCK_TOKENS, rank=3)
