"""The client and real engine processes: streams that survive deaths, clean ends, no leftovers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from lorikeet.client.client import DEATHS_PER_REQUEST, EngineClient, RequestHandle
from lorikeet.client.supervisor import EngineError
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvicted, AdapterLoaded, FinishReason
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.packing import pack
from tests.support.live import (
    TIE,
    engine_process,
    engine_processes,
    finish,
    greedy,
    is_idle,
    live_settings,
    make_adapter,
    make_model,
    prompt,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, model, seed) for seed, name in enumerate("abc")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: Path) -> AsyncIterator[EngineClient]:
    """One engine for all tests that leave it as it was, or better."""
    async with engine_process(live_settings(model, num_scheduler_steps=1)) as started:
        yield started


def kill(client: EngineClient) -> None:
    assert client.process_id is not None
    os.kill(client.process_id, signal.SIGKILL)


async def killed_and_up_again(client: EngineClient) -> None:
    restarts = client.restarts
    kill(client)
    await until(lambda: client.restarts > restarts and client.alive, "the engine has restarted")


async def begun(*handles: RequestHandle, tokens: int = 1) -> None:
    await until(
        lambda: all(len(handle.token_ids) >= tokens for handle in handles), "every request has its first tokens"
    )


def nodes(client: EngineClient) -> int | None:
    """How many adapters and blocks of KV the engine's tree knows."""
    return None if client.stats is None else client.stats.memory.nodes


async def idle_nodes(client: EngineClient) -> int:
    """The same, once nothing runs."""
    await until(lambda: is_idle(client.stats), "the engine holds nothing")
    return nodes(client) or 0


async def test_streams_of_a_killed_engine_go_on_without_a_gap_or_a_repeat(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    versions = [None, *adapters.values()]
    requests = [
        greedy(str(index), prompt(10 + index, seed=index), 200 + index, versions[index % 4]) for index in range(11)
    ]
    requests.append(greedy("sampled", prompt(9), 200, adapters["a"], temperature=1.0, seed=3, presence_penalty=0.5))
    undisturbed = [client.submit(request) for request in requests]
    ends = await asyncio.gather(*map(finish, undisturbed))

    restarts = client.restarts
    disturbed = [client.submit(request) for request in requests]
    reading = asyncio.gather(*map(finish, disturbed))
    await begun(*disturbed, tokens=3)
    assert not any(handle.timings.finished_s for handle in disturbed), "all are in flight when the engine dies"
    kill(client)
    for (finished, gaps), handle in zip(await reading, disturbed, strict=True):
        assert finished.reason is FinishReason.LENGTH
        assert handle.deaths == 1
        assert len(gaps) == len(handle.token_ids) == handle.request.sampling.max_tokens, "each token came once"
    assert client.restarts == restarts + 1

    ties = 0
    for before, after, (_, gaps) in zip(undisturbed, disturbed, ends, strict=True):
        if before.token_ids != after.token_ids:
            pairs = zip(before.token_ids, after.token_ids, strict=True)
            first = next(index for index, (one, other) in enumerate(pairs) if one != other)
            assert gaps[first] < TIE, f"{before.request.request_id} differs from token {first} on"
            ties += 1
    assert ties <= 1
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


async def test_a_sleeping_engine_has_no_memory_and_its_streams_go_on_when_it_wakes(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    asked = greedy("a", prompt(20), 300, adapters["a"])
    undisturbed = client.submit(asked)
    await finish(undisturbed)
    handle = client.submit(asked)
    reading = asyncio.create_task(finish(handle))
    await begun(handle, tokens=3)
    restarts = client.restarts
    pid = client.process_id
    assert pid is not None
    await client.sleep()
    assert client.is_asleep
    assert not psutil.pid_exists(pid)
    assert not client.alive
    assert await client.drop_adapter(adapters["b"].digest) == 0
    dropping = asyncio.create_task(client.drop_adapter(adapters["a"].digest))
    late = client.submit(greedy("late", prompt(10), 5, adapters["c"]))
    assert not reading.done()
    await client.sleep()
    await client.wake()
    finished, gaps = await reading
    assert finished.reason is FinishReason.LENGTH
    assert len(gaps) == len(handle.token_ids) == 300
    assert handle.token_ids == undisturbed.token_ids
    assert handle.deaths == 0
    assert (await finish(late))[0].reason is FinishReason.LENGTH
    assert await dropping > 0, "the request that slept has used it"
    assert client.restarts == restarts, "waking is no restart"
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


def has_arena(pid: int) -> bool:
    """Return whether a process has allocated the host's arena, which is mapped last."""
    return any("lorikeet-host-arena" in each.path for each in psutil.Process(pid).memory_maps())


async def test_an_engine_with_its_weights_alone_gets_its_pool_later(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    await client.sleep()
    await client.wake(pool=False)
    assert client.is_asleep
    assert not client.alive
    first = client.process_id
    assert first is not None
    assert not has_arena(first)
    await client.wake(pool=False)
    assert client.process_id == first, "it has its weights already"
    await client.sleep()
    assert not psutil.pid_exists(first)
    await client.wake(pool=False)
    late = client.submit(greedy("late", prompt(10), 5, adapters["c"]))
    restarts = client.restarts
    pid = client.process_id
    await client.wake()
    assert client.process_id == pid
    assert has_arena(pid or 0)
    assert not client.is_asleep
    assert (await finish(late))[0].reason is FinishReason.LENGTH
    assert client.restarts == restarts
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


async def test_requests_are_computed_again_under_another_salt(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    asked = greedy("a", prompt(40), 300, adapters["a"])
    undisturbed = client.submit(asked)
    await finish(undisturbed)
    handle = client.submit(asked)
    reading = asyncio.create_task(finish(handle))
    await begun(handle, tokens=3)
    client.recompute("salt")
    finished, gaps = await reading
    assert finished.reason is FinishReason.LENGTH
    assert len(gaps) == len(handle.token_ids) == 300, "each token came once"
    assert handle.token_ids == undisturbed.token_ids
    assert handle.attempt == 1


@pytest.mark.long
async def test_streams_of_an_engine_that_is_stopped_go_on_with_another(model: Path) -> None:
    async with engine_process(live_settings(model, num_scheduler_steps=1, heartbeat_timeout_s=6.0)) as client:
        handles = [client.submit(greedy(str(seed), prompt(10, seed), 300)) for seed in range(3)]
        reading = asyncio.gather(*map(finish, handles))
        await begun(*handles)
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        await until(lambda: not client.alive, "the engine is known not to answer")
        assert not client.restarts
        late = client.submit(greedy("late", prompt(10), 20))
        for (finished, gaps), handle in zip(await reading, handles, strict=True):
            assert finished.reason is FinishReason.LENGTH
            assert len(gaps) == len(handle.token_ids) == 300
        assert (await finish(late))[0].reason is FinishReason.LENGTH
        assert client.restarts == 1
        assert client.alive


async def test_an_aborted_request_gives_its_blocks_back(client: EngineClient, adapters: dict[str, AdapterRef]) -> None:
    for version in adapters.values():  # so that no load delays it while the others get all their tokens
        await finish(client.submit(greedy(f"load {version.name}", prompt(4), 1, version)))
    handles = [client.submit(greedy(f"long {v}", prompt(40), 400, v)) for v in (None, *adapters.values())]
    await begun(*handles)
    for handle in handles:
        handle.abort()
        handle.abort()
    for handle in handles:
        assert (await finish(handle))[0].reason is FinishReason.ABORT
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


async def test_a_request_can_be_aborted_before_the_engine_has_seen_it(client: EngineClient) -> None:
    handle = client.submit(greedy("brief", prompt(4), 4))
    handle.abort()
    assert (await finish(handle))[0].reason is FinishReason.ABORT
    again = client.submit(greedy("after", prompt(4), 4))
    assert (await finish(again))[0].reason is FinishReason.LENGTH


async def test_an_id_in_use_is_refused(client: EngineClient) -> None:
    handle = client.submit(greedy("twin", prompt(4), 100))
    with pytest.raises(ValueError, match="'twin' is in use"):
        client.submit(greedy("twin", prompt(4), 1))
    handle.abort()


async def test_a_dropped_adapter_tells_its_bytes_once_its_requests_have_ended(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    events: list[object] = []
    client.on_adapter_event(events.append)
    digest = adapters["b"].digest
    handle = client.submit(greedy("under b", prompt(30), 40, adapters["b"]))
    await begun(handle)
    blocks = client.engine_info.block_bytes
    freed_bytes = await client.drop_adapter(digest)
    assert handle.timings.finished_s is not None, "it was not taken from a running request"
    assert freed_bytes > 0
    assert freed_bytes % blocks == 0
    evicted = [event for event in events if isinstance(event, AdapterEvicted) and event.digest == digest]
    assert [event.freed_bytes for event in evicted] == [freed_bytes]
    assert await client.drop_adapter(digest) == 0
    await until(
        lambda: client.stats is not None and digest not in client.stats.resident_adapters,
        "the engine has dropped the adapter",
    )
    await finish(client.submit(greedy("under b again", prompt(30), 1, adapters["b"])))
    assert isinstance(events[-1], AdapterLoaded)


async def test_requests_that_arrive_after_a_drop_are_served_before_it(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    first = client.submit(greedy("first", prompt(30), 200, adapters["c"]))
    await begun(first)
    dropping = asyncio.create_task(client.drop_adapter(adapters["c"].digest))
    await asyncio.sleep(0)
    second = client.submit(greedy("second", prompt(30), 2, adapters["c"]))
    first.abort()
    assert (await finish(second))[0].reason is FinishReason.LENGTH
    assert await dropping > 0
    await until(
        lambda: client.stats is not None and adapters["c"].digest not in client.stats.resident_adapters,
        "the engine has dropped adapter c",
    )
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


async def test_drops_and_new_requests_survive_an_engine_death(
    client: EngineClient, adapters: dict[str, AdapterRef]
) -> None:
    handle = client.submit(greedy("running", prompt(30), 400, adapters["a"]))
    await begun(handle)
    kill(client)
    await until(lambda: client.process_id is None, "the engine process has ended")
    dropping = asyncio.create_task(client.drop_adapter(adapters["a"].digest))
    newcomer = client.submit(greedy("newcomer", prompt(12), 5))
    assert (await finish(newcomer))[0].reason is FinishReason.LENGTH
    assert (await finish(handle))[0].reason is FinishReason.LENGTH
    assert await dropping > 0, "it was loaded again for the request that was running, then dropped"
    await until(
        lambda: client.stats is not None and adapters["a"].digest not in client.stats.resident_adapters,
        "the engine has dropped adapter a",
    )


async def test_every_new_engine_gets_the_registered_adapters(
    client: EngineClient, adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.client.supervisor.MAX_ADAPTERS_PER_MESSAGE", 2)
    refs = [msgspec.structs.replace(adapters["a"], digest=AdapterDigest(digit * 64)) for digit in "123"]
    before = await idle_nodes(client)
    client.register_adapters(refs)
    await until(lambda: nodes(client) == before + 3, "the tree has three nodes more")
    freed_bytes = await client.drop_adapter(refs[0].digest)
    info = client.engine_info
    blocks = pack(refs[0].ranks, info.geometry, info.block_bytes // info.geometry.dtype_bytes).blocks
    on_both_tiers = 2 * blocks * info.block_bytes
    assert freed_bytes in (0, on_both_tiers // 2, on_both_tiers), "nothing of it but what was prefetched"
    await until(lambda: nodes(client) == before + 2, "the tree has two nodes more")
    kill(client)
    await until(lambda: client.process_id is None, "the engine process has ended")
    client.register_adapters(refs[:1])
    await until(lambda: nodes(client) == 3, "the tree has three nodes")
    for ref in refs:
        await client.drop_adapter(ref.digest)
    await until(lambda: nodes(client) == 0, "the tree is empty")


async def test_an_adapter_made_known_again_while_it_is_dropped_stays_known(
    client: EngineClient, model: Path, tmp_path: Path
) -> None:
    ref = make_adapter(tmp_path / "d", model, seed=3)
    before = await idle_nodes(client)
    client.register_adapters([ref])
    handle = client.submit(greedy("under d", prompt(8), 100, ref))
    await begun(handle)
    dropping = asyncio.create_task(client.drop_adapter(ref.digest))
    await asyncio.sleep(0)
    client.register_adapters([ref])
    assert await dropping > 0
    await until(
        lambda: is_idle(client.stats) and nodes(client) == before + 1,
        "the engine is idle and the tree has one node more",
    )
    await client.drop_adapter(ref.digest)  # it may have been prefetched by now


async def test_a_request_that_saw_too_many_deaths_ends_with_an_error_and_others_go_on(client: EngineClient) -> None:
    suspect = client.submit(greedy("suspect", prompt(8), 450))
    for death in range(DEATHS_PER_REQUEST):
        await until(lambda: client.alive, "the engine is up")
        await begun(suspect, tokens=len(suspect.token_ids) + 1)
        if death == DEATHS_PER_REQUEST - 1:
            other = client.submit(greedy("other", prompt(8, seed=1), 20))
            await begun(other)
        kill(client)
        await until(lambda death=death: suspect.deaths == death + 1, "the death is counted")  # type: ignore[misc]
    finished, gaps = await finish(suspect)
    assert finished.reason is FinishReason.ERROR
    assert "died 3 times" in (finished.error or "")
    assert "code -9" in (finished.error or "")
    assert len(gaps) == len(suspect.token_ids) < 450
    assert (await finish(other))[0].reason is FinishReason.LENGTH
    assert len(other.token_ids) == 20
    await until(lambda: is_idle(client.stats), "the engine holds nothing")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(engine=EngineSettings(preset="nobody:nothing")), "unknown preset 'nobody:nothing'"),
        (live_settings(Path("/nowhere/at-all")), "/nowhere/at-all"),
    ],
)
async def test_failed_engine_start_has_the_reason(settings: Settings, reason: str) -> None:
    before = engine_processes()
    client = EngineClient(settings)
    with pytest.raises(EngineError, match=reason):
        await client.start(lambda progress: None)
    assert engine_processes() <= before
    await client.close()
    with pytest.raises(EngineError, match="shutting down"):
        client.submit(greedy("late", prompt(4), 1))


async def test_closing_ends_the_process_and_every_stream(model: Path) -> None:
    async with engine_process(live_settings(model)) as client:
        process = psutil.Process(client.process_id)
        handle = client.submit(greedy("long", prompt(8), 450))
        await begun(handle)
    assert not process.is_running()
    with pytest.raises(EngineError, match="shutting down"):
        await finish(handle)


async def test_closing_while_a_new_engine_starts_ends_that_one_too(model: Path) -> None:
    before = engine_processes()
    async with engine_process(live_settings(model)) as client:
        handle = client.submit(greedy("long", prompt(8), 450))
        await begun(handle)
        kill(client)
        await until(lambda: not client.alive, "no replica is up")
        await until(lambda: engine_processes() - before, "an engine process runs")
    assert engine_processes() <= before
    with pytest.raises(EngineError, match="shutting down"):
        await finish(handle)


PARENT = """
import asyncio, sys, msgspec
from lorikeet.config import Settings
from lorikeet.client.client import EngineClient

async def main():
    client = EngineClient(msgspec.json.decode(sys.argv[1], type=Settings))
    await client.start(lambda progress: None)
    print(client.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_engine_ends_when_the_api_process_is_killed(model: Path) -> None:
    settings = live_settings(model)
    encoded = json.dumps({"model": {"model": settings.model.model}, "engine": {"threads": 1, "memory_bytes": 2**20}})
    parent = subprocess.Popen([sys.executable, "-c", PARENT, encoded], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        await asyncio.to_thread(parent.wait)
        await asyncio.to_thread(engine.wait)
    finally:
        parent.kill()
        parent.communicate()
