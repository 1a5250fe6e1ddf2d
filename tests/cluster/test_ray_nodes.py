"""Three Ray nodes under two controllers, only with --all: streams survive the loss of each part."""

import asyncio
import random
import string
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lorikeet.core.machine import free_memory_bytes, memory_limit_bytes
from lorikeet.router.adapters import describe_adapter
from lorikeet.router.proxied_request import COMPLETIONS
from tests.models.checkpoints import make_checkpoint
from tests.router.conftest import Routing, events, routing, text_of
from tests.support.live import TIE, write_adapter
from tests.support.served import Server, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ADAPTERS, STREAMS = 60, 200
MEMORY = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
HEAD, OTHER = {"num_cpus": 2, **MEMORY}, {"num_cpus": 1, **MEMORY}
"""Four places in all, as many as there are replicas: one that loses its node needs the new one."""
TURNS = "lorikeet:plain,placement=everywhere,routing=round-robin,placement_period_s=0.5"
"""Every replica is to have every adapter that it is asked for, wherever it was before."""
LETTERS = string.ascii_lowercase


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """Three nodes."""
    # Hooks for the exit could be set in the main thread only, and a node is added in another.
    cluster = Cluster(initialize_head=True, head_node_args=HEAD, shutdown_at_exit=False)
    for _ in range(2):
        add_node(cluster)
    yield cluster
    with suppress(Exception):
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny fp32 Llama whose tokens are letters: a stream that goes on elsewhere has the tokens that it had."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    make_checkpoint(tmp_path / "tiny", "llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    return tmp_path / "tiny"


async def test_no_stream_notices_that_a_node_an_orchestrator_and_a_controller_are_lost(
    nodes: Cluster, model: Path, tmp_path: Path, postgres_url: str
) -> None:
    sources = {f"a{number}": tmp_path / "sources" / f"a{number}" for number in range(ADAPTERS)}
    for seed, folder in enumerate(sources.values()):
        write_adapter(folder, model, seed)
    flags = ["--replicas", "2", "--threads", "1", "--ray-address", nodes.address, "--dtype", "float32"]
    flags += ["--registry-url", postgres_url, "--store-dir", str(tmp_path / "store"), "--preset", TURNS]
    flags += ["--adapter-dir", str(tmp_path / "sources"), "--adapter-dir-mode", "allow"]
    flags += ["--orphan-timeout", "0"]  # What is adopted is in ``test_adoption``: here the lost ones are replaced.
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(model, tmp_path / name, *flags)) for name in "ab")
        controllers = await asyncio.gather(*starting)
        first, second = controllers
        for name, folder in sources.items():
            content = {"lora_name": name, "lora_path": str(folder)}
            assert (await first.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
        await until(lambda: lists(second, ADAPTERS), "the other controller has read them in the registry")

        asked = bodies(model)
        once = asyncio.Semaphore(32)
        whole = await asyncio.gather(*(answer(first, body, once) for body in asked))
        copies = (await cluster_of(first))["copies"]
        assert copies["provisions"] == ADAPTERS, "the files of each are read once"
        assert copies["fetches"] > ADAPTERS // 2, "the second access is to a peer's memory"

        # The controller that is not killed is to lose a replica with its node.
        await asyncio.to_thread(nodes.wait_for_nodes)
        assert len(nodes.list_all_nodes()) == 3
        lost_node = nodes.list_all_nodes()[-1]
        on_node = {child.pid for child in raylet_of(lost_node).children(recursive=True)}
        keeps, killed = (first, second) if on_node & await engines_of(first) else (second, first)
        assert on_node & await engines_of(keeps)
        # What two replicas on one node share need not be copied. The lost node has room for one replica only.
        copying = [keeps, killed] if await is_on_two_nodes(killed, nodes) else [keeps]

        known = tuple(describe_adapter(name, str(folder)) for name, folder in sources.items())
        urls = [str(each.http.base_url) for each in controllers]
        router = await stack.enter_async_context(routing(urls, adapters=known, preset="lorikeet:round-robin"))
        await router.up(2)
        found = orchestrators(nodes)
        assert len(found) == 2, "each controller has one"
        begun, ended = await streams_of(router, asked, stack)
        await until(lambda: len(begun) > STREAMS // 2 + 20, "so many have begun that some are of each controller")
        before = await cluster_of(killed)
        killed.process.kill()  # first: the others take time, in which its streams might end
        raylet_of(lost_node).kill()  # what it started ends with it
        for orchestrator in found:
            orchestrator.kill()
        exchanging = asyncio.create_task(asyncio.to_thread(exchange, nodes, lost_node))
        said = await ended
        await exchanging
        assert await continued_by(router) > 0

        for body, text, (expected, gaps) in zip(asked, said, whole, strict=True):
            assert len(text) == body["max_tokens"], "nothing is lost or repeated"
            tie = next((at for at, gap in enumerate(gaps) if gap < TIE), len(gaps))
            assert text[:tie] == expected[:tie]

        async def is_whole() -> bool:
            replicas = (await cluster_of(keeps))["replicas"]
            return len(replicas) == 2 and all(each["is_open"] for each in replicas)

        await until(is_whole, "the replica is on the new node")
        after = await cluster_of(keeps)
        assert sum(each["restarts"] for each in after["replicas"]) == 1
        for server, copies in ((killed, before["copies"]), (keeps, after["copies"])):
            assert copies["peer_bytes"] <= copies["fetched_bytes"] + copies["provided_bytes"], "straight to memory"
            assert copies["peer_bytes"] > 0 or server not in copying
            # On a machine with little memory left, copies go to its disk.
            assert copies["disk_bytes"] == 0 or free_memory_bytes() < memory_limit_bytes() / 3


def bodies(model: Path) -> list[dict[str, Any]]:
    """Return greedy requests of several lengths that nothing else ends."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    bias = {str(number): -100.0 for text, number in vocabulary.items() if text not in LETTERS}
    chosen = random.Random(0)
    common = {"temperature": 0, "ignore_eos": True, "logit_bias": bias}
    return [
        {
            **common,
            "model": f"a{number % ADAPTERS}",
            "prompt": "".join(chosen.choices(LETTERS, k=8)),
            "max_tokens": 350 + number % 100,
        }
        for number in range(STREAMS)
    ]


async def answer(server: Server, body: dict[str, Any], once: asyncio.Semaphore) -> tuple[str, list[float]]:
    """Return an answer, and by how much each of its tokens was the likeliest."""
    async with once:
        reply = await server.http.post(COMPLETIONS, json={**body, "logprobs": 2})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    tops = [sorted(each.values(), reverse=True) for each in choice["logprobs"]["top_logprobs"]]
    return choice["text"], [top[0] - top[1] for top in tops]


async def streams_of(
    router: Routing, asked: list[dict[str, Any]], stack: AsyncExitStack
) -> tuple[dict[int, list[str]], "asyncio.Future[list[str]]"]:
    """Start all streams at a router. Return the lines of those that have begun, and the texts."""
    limits = httpx.Limits(max_connections=None)
    http = httpx.AsyncClient(base_url=router.http.base_url, timeout=300, limits=limits)
    await stack.enter_async_context(http)
    begun: dict[int, list[str]] = {}

    class Lines(list[str]):
        """Tells with its first line that a stream has begun."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self._number = number

        def append(self, line: str) -> None:
            begun.setdefault(self._number, self)
            super().append(line)

    async def stream(number: int, body: dict[str, Any]) -> str:
        chunks = await events(http, COMPLETIONS, body, Lines(number))
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert [each["finish_reason"] for chunk in chunks for each in chunk["choices"] if each["finish_reason"]] == [
            "length"
        ]
        return text_of(chunks)

    return begun, asyncio.gather(*(stream(number, body) for number, body in enumerate(asked)))


def exchange(nodes: Cluster, lost_node: Any) -> None:
    """Clear away a node that has been killed, and add another."""
    nodes.remove_node(lost_node, allow_graceful=False)
    add_node(nodes)


def add_node(nodes: Cluster) -> None:
    """Add a node with room for one replica; Ray gives it 30 s to start, which a busy machine may exceed."""
    for is_last in (False, False, True):
        try:
            nodes.add_node(**OTHER)
        except Exception:
            if is_last:
                raise
        else:
            return


async def continued_by(router: Routing) -> int:
    """Return how many streams went on at another controller."""
    lines = (await router.http.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith("lorikeet:route_continued_total ")]
    return int(float(line.split()[1]))


async def lists(server: Server, adapters: int) -> bool:
    return len((await server.http.get("/v1/models")).json()["data"]) == 1 + adapters


async def cluster_of(server: Server) -> dict[str, Any]:
    return dict((await server.http.get("/v1/cluster")).json())


async def engines_of(server: Server) -> set[int]:
    return {replica["pid"] for replica in (await cluster_of(server))["replicas"]}


async def is_on_two_nodes(server: Server, nodes: Cluster) -> bool:
    engines = await engines_of(server)
    on = [engines & {each.pid for each in raylet_of(node).children(recursive=True)} for node in nodes.list_all_nodes()]
    return sum(map(bool, on)) == 2


def raylet_of(node: Any) -> psutil.Process:
    (raylet,) = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid)


def orchestrators(nodes: Cluster) -> list[psutil.Process]:
    """Return the processes of the orchestrators, of whichever controller."""
    found = [child for node in nodes.list_all_nodes() for child in raylet_of(node).children(recursive=True)]
    return [each for each in found if "Orchestrator" in " ".join(each.cmdline())]
