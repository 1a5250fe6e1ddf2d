"""Measures the time to the first token if only another replica has the adapter: ``python -m benchmarks.cold_peer``.

Two replicas of SmolLM2 run on an embedded Ray, and every request runs alone. Before the request, its adapter is in the
place that the row names:

* ``this replica's memory``: a copy lies in the pool of the replica that gets the request, in its machine's memory.
* ``a peer's, on the same machine``: only the other replica has one, and the two share its files.
* ``a peer's, over TCP``: the same, and it goes from memory to memory, as between machines.
* ``a peer's, object store``: the same, through Ray's object store, as where machines cannot connect to each other.

Sides run in turns. Every copy is compared with the file that it was made from.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness import default_model, print_setup, print_table, ratios, with_interval
from lorikeet.adapters.store import reference
from lorikeet.client.client import RequestOutput
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.cluster.ray.host import RayHost
from lorikeet.cluster.ray.transport import RayTransport
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.config import AdapterSettings, ClusterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import write_random_adapter

OWN = "this replica's memory"
SHARED = "a peer's, on the same machine"
TCP = "a peer's, over TCP"
STORE = "a peer's, object store"
HAS = ReplicaId("replica-0")
LACKS = ReplicaId("replica-1")
RANKS = (8, 64)
PROMPT_TOKENS = 16
_QUIET_S = 0.2
"""Pause after a request, in which its engine comes to rest."""
WEIGHTS = "adapter_model.safetensors"


class Directed(RoutingPolicy):
    """Sends every request to ``target``."""

    target = HAS

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the target."""
        return Choice(self.target)


class Bench:
    """A cluster whose requests come one by one.

    Args:
        client: started.
        routing: the client's routing policy.
        make: makes an adapter of a rank that no replica has seen.
    """

    def __init__(self, client: ClusterClient, routing: Directed, make: Callable[[int], AdapterRef]) -> None:
        self._client = client
        self._routing = routing
        self._make = make
        self._numbers = count()

    async def own_s(self, rank: int) -> float:
        """Return TTFT with a copy in this replica's pool and nothing in its engine."""
        adapter = await self._at_peer(rank)
        copier = self._client._files.copier
        copier._place(await copier._transport.copy(adapter, HAS, LACKS), LACKS)
        self._client._dispatcher.pool.seed(adapter.digest, LACKS)
        return self._checked(adapter, await self._ttft_s(adapter, LACKS))

    async def shared_s(self, rank: int) -> float:
        """Return TTFT with a copy at the peer, on the same machine."""
        adapter = await self._at_peer(rank)
        before = self._client.describe().copies.peer_bytes
        seconds = await self._ttft_s(adapter, LACKS)
        assert self._client.describe().copies.peer_bytes == before
        return self._checked(adapter, seconds)

    async def tcp_s(self, rank: int) -> float:
        """Return TTFT with a copy at the peer, fetched over TCP."""
        adapter = await self._at_peer(rank)
        before = self._client.describe().copies.peer_bytes
        with mock.patch.object(RayHost, "node_id", property(id)):
            seconds = await self._ttft_s(adapter, LACKS)
        assert self._client.describe().copies.peer_bytes - before == adapter.weight_bytes
        return self._checked(adapter, seconds)

    async def store_s(self, rank: int) -> float:
        """Return TTFT with a copy at the peer, fetched through the object store."""
        adapter = await self._at_peer(rank)
        before = self._client.describe().copies
        peer_bytes = before.peer_bytes
        fetches = before.fetches
        unreachable = mock.patch.object(RayTransport, "_fetch", mock.AsyncMock(return_value=None))
        with mock.patch.object(RayHost, "node_id", property(id)), unreachable:
            seconds = await self._ttft_s(adapter, LACKS)
        after = self._client.describe().copies
        assert (after.peer_bytes, after.fetches) == (peer_bytes, fetches + 1)
        return self._checked(adapter, seconds)

    async def _at_peer(self, rank: int) -> AdapterRef:
        adapter = self._make(rank)
        self._client.register_adapters([adapter])
        await self._ttft_s(adapter, HAS)
        await asyncio.sleep(_QUIET_S)
        return adapter

    def _checked(self, adapter: AdapterRef, seconds: float) -> float:
        copy = self._client._files.copier.placed(adapter.digest, LACKS)
        assert copy.folder != adapter.folder
        assert (Path(copy.folder) / WEIGHTS).read_bytes() == (Path(adapter.folder) / WEIGHTS).read_bytes()
        return seconds

    async def _ttft_s(self, adapter: AdapterRef, replica: ReplicaId) -> float:
        self._routing.target = replica
        number = next(self._numbers)
        prompt = [300 + (number * 17 + at * 31) % 9000 for at in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=2, temperature=0.0)
        began_s = time.perf_counter()
        first_s = list[float]()
        ended = asyncio.Event()

        def listen(output: object) -> None:
            assert isinstance(output, RequestOutput)
            if output.tokens and not first_s:
                first_s.append(time.perf_counter() - began_s)
            if output.finished is not None:
                assert output.finished.error is None, output.finished
                ended.set()

        self._client.submit(Request(RequestId(f"r{number}"), prompt, params, time.monotonic(), adapter)).listen(listen)
        await ended.wait()
        return first_s[0]


async def measure(rounds: int) -> None:
    """Print the table."""
    model = default_model()
    geometry = read_model_config(model).geometry(2)
    numbers = count()
    with tempfile.TemporaryDirectory() as scratch:

        def make(rank: int) -> AdapterRef:
            number = next(numbers)
            folder = Path(scratch) / f"a{number}"
            write_random_adapter(folder, geometry, rank, modules=LORA_MODULES, seed=number, dtype=torch.bfloat16)
            return reference(folder.name, folder, geometry)

        settings = Settings(
            ModelSettings(str(model), dtype="bfloat16"),
            EngineSettings(preset="lorikeet:auto,prefetch=none", threads=1),
            AdapterSettings(store_dir=f"{scratch}/store"),
            cluster=ClusterSettings(replicas=2),
        )
        routing = Directed()
        async with AsyncExitStack() as stack:
            with mock.patch("lorikeet.cluster.open.build_routing", return_value=routing):
                client = open_cluster(settings, stack)
            stack.push_async_callback(client.close)
            await client.start(lambda progress: None)
            bench = Bench(client, routing, make)
            sides = {OWN: bench.own_s, SHARED: bench.shared_s, TCP: bench.tcp_s, STORE: bench.store_s}
            for rank in RANKS:
                await _table(rank, sides, rounds, make(rank).weight_bytes)


async def _table(
    rank: int, sides: Mapping[str, Callable[[int], Awaitable[float]]], rounds: int, weight_bytes: int
) -> None:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            seconds = await sides[name](rank)
            if number:  # the first round is a warm-up
                found[name].append(seconds)
    rows = [
        [name, with_interval([1e3 * each for each in found[name]]), *_against(found, name, (OWN, STORE))]
        for name in sides
    ]
    title = f"TTFT of a cold adapter of rank {rank}, {weight_bytes / 2**20:.1f} MiB; medians of {rounds}"
    print_table(title, ["its copy is in", "ms", "÷ own", "÷ object store"], rows)


def _against(found: dict[str, list[float]], name: str, others: Sequence[str]) -> list[str]:
    return [with_interval(ratios(found[name], found[other]), ".2f") for other in others]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of each side, in turns")
    options = parser.parse_args()
    print_setup()
    asyncio.run(measure(options.rounds))


if __name__ == "__main__":
    main()
