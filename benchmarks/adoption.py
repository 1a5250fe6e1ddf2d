"""Kill one of two servers on a Ray cluster in the midst of its streams, and time how the other adopts its replica.

Ray starts here, with two nodes. Every client repeats its request at the other server once the replica is adopted. The
last lines name what was lost: streams that are not whole, or not those of an undisturbed server.

    python -m benchmarks.adoption --streams 100
"""

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from ray.cluster_utils import Cluster

from benchmarks.harness import print_setup
from tests.support.live import write_adapter
from tests.support.served import Server, make_model, serving

COMPLETIONS = "/v1/completions"
TOKENS = 1000
ADAPTERS = 4
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


def body(number: int) -> dict[str, Any]:
    """Return the request of a stream, with a prompt of its own."""
    prompt = [5 + number % 100, 6, 7 + number // 100]
    common = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "return_token_ids": True}
    return {**common, "model": f"a{number % ADAPTERS}", "prompt": prompt, "stream": True}


async def stream(server: Server, number: int, into: list[int], run: str) -> bool:
    """Read one stream, as far as it comes, and return whether it is whole."""
    is_whole = False
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.http.base_url, timeout=600, limits=limits) as http:
        with suppress(httpx.TransportError):
            headers = {"X-Request-Id": f"{run}-{number}"}
            async with http.stream("POST", COMPLETIONS, json=body(number), headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        into += json.loads(line[6:])["choices"][0]["token_ids"]
                    is_whole = is_whole or line == "data: [DONE]"
    return is_whole


async def adopted(server: Server) -> bool:
    """Return whether a replica of the lost server is open here."""
    state = (await server.http.get("/v1/cluster")).json()
    return state["adoptions"]["adopted"] == 1 and sum(each["is_open"] for each in state["replicas"]) == 2


async def measure(streams: int, folder: Path) -> None:
    """Run the experiment, and print its figures."""
    model = make_model(folder / "model", positions=2 * TOKENS)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE}, shutdown_at_exit=False)
    nodes.add_node(num_cpus=1, **NODE)
    flags = ["--replicas", "1", "--threads", "1", "--ray-address", nodes.address, "--dtype", "float32"]
    flags += ["--memory", "128MiB", "--max-num-seqs", str(streams)]  # All streams run at once.
    flags += ["--registry-url", f"sqlite:///{folder}/registry.db", "--store-dir", str(folder / "store")]
    flags += ["--lora-modules"]
    for number in range(ADAPTERS):
        write_adapter(folder / f"a{number}", model, number)
        flags.append(f"a{number}={folder / f'a{number}'}")
    async with AsyncExitStack() as stack:
        killed, keeps = await asyncio.gather(
            *(stack.enter_async_context(serving(model, folder / name, *flags)) for name in "ab")
        )
        expected: list[list[int]] = [[] for _ in range(streams)]
        await asyncio.gather(*(stream(keeps, number, expected[number], "before") for number in range(streams)))
        begun: list[list[int]] = [[] for _ in range(streams)]
        reading = asyncio.gather(*(stream(killed, number, begun[number], "run") for number in range(streams)))
        while not all(begun):
            await asyncio.sleep(0.01)
        killed.process.kill()
        killed_s = time.monotonic()
        broken = [not is_whole for is_whole in await reading]
        while not await adopted(keeps):
            await asyncio.sleep(0.05)
        adopted_s = time.monotonic() - killed_s
        again: list[list[int]] = [[] for _ in range(streams)]
        whole = await asyncio.gather(*(stream(keeps, number, again[number], "run") for number in range(streams)))
        state = (await keeps.http.get("/v1/cluster")).json()["adoptions"]
        print(f"streams broken: {sum(broken)} of {streams}")
        print(f"replica adopted after: {adopted_s:.1f} s")
        print(f"requests resumed with their tokens: {state['resumed']}")
        print(f"streams whole after their repeat: {sum(whole)}")
        print(f"streams equal to those without the death: {sum(map(list.__eq__, again, expected))}")
    nodes.shutdown()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100, help="streams at the server that is killed")
    options = parser.parse_args()
    print_setup()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options.streams, Path(folder)))


if __name__ == "__main__":
    main()
