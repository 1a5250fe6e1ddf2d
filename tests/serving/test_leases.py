"""Leases of adapter versions: one for each request, from the lookup of its model to its end, given back once."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.client.supervisor import EngineError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.request import Request
from lorikeet.serving.leases import AdapterLeases, VersionChanged
from tests.support.api_server import Running
from tests.support.chat_requests import CHAT, body
from tests.support.waiting import until

COMPLETION = {"model": "formal", "prompt": "hello", "max_tokens": 4}


class CountedLeases:
    """Counts leases of a server's adapter versions.

    Attributes:
        taken, released: numbers so far.
    """

    def __init__(self, catalog: AdapterCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = Counter[AdapterDigest]()
        self.released = Counter[AdapterDigest]()
        acquire = catalog.acquire
        release = catalog.release

        def counted_acquire(digest: AdapterDigest) -> None:
            acquire(digest)
            self.taken[digest] += 1

        def counted_release(digest: AdapterDigest) -> None:
            self.released[digest] += 1
            release(digest)

        monkeypatch.setattr(catalog, "acquire", counted_acquire)
        monkeypatch.setattr(catalog, "release", counted_release)

    async def check(self, taken: int) -> None:
        """Wait until all leases are given back; check that there were ``taken``."""
        await until(lambda: self.released.total() >= self.taken.total(), "every lease is given back")
        await asyncio.sleep(0.05)  # a second release would come now
        assert self.taken.total() == taken
        assert self.released == self.taken


@pytest.fixture
def leases(server: Running, monkeypatch: pytest.MonkeyPatch) -> CountedLeases:
    return CountedLeases(server.service.catalog, monkeypatch)


def adapter(server: Running) -> AdapterRef:
    record = server.service.catalog.get("formal")
    assert record is not None
    return record.ref


@pytest.mark.parametrize("stream", [False, True])
async def test_request_takes_one_lease(server: Running, leases: CountedLeases, stream: bool) -> None:
    assert (await server.http.post(CHAT, json=body(model="formal", stream=stream))).status_code == 200
    await leases.check(1)
    assert (await server.http.post("/v1/completions", json=COMPLETION | {"stream": stream})).status_code == 200
    await leases.check(2)


async def test_several_choices_share_one_lease(server: Running, leases: CountedLeases) -> None:
    await server.http.post("/v1/completions", json=COMPLETION | {"n": 3, "prompt": ["one", "two"]})
    assert len(server.engine.submitted) == 6
    await leases.check(1)


async def test_base_model_needs_no_lease(server: Running, leases: CountedLeases) -> None:
    assert (await server.http.post(CHAT, json=body())).status_code == 200
    await leases.check(0)


async def test_large_body_takes_one_lease(server: Running, leases: CountedLeases) -> None:
    large = body(model="formal", metadata={"padding": " " * 70_000})
    assert (await server.http.post(CHAT, json=large)).status_code == 200
    await leases.check(1)
    assert (await server.http.post(CHAT, json=large | {"logit_bias": {"x": 1}})).status_code == 400
    await leases.check(2)


@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [
        (CHAT, body(model="formal", max_tokens=10_000), 400),
        (CHAT, body(model="formal", logit_bias={"x": 1}), 400),
        (CHAT, body(model="formal", response_format={"type": "json_schema"}), 400),
        ("/v1/completions", COMPLETION | {"prompt": []}, 400),
        ("/v1/completions", COMPLETION | {"prompt": [[999_999]]}, 400),
        ("/v1/embeddings", {"model": "formal", "input": [[999_999]]}, 400),
    ],
)
async def test_refused_request_gives_its_lease_back(
    server: Running, leases: CountedLeases, path: str, wrong: dict[str, Any], status: int
) -> None:
    reply = await server.http.post(path, json=wrong)
    assert reply.status_code == status, reply.text
    assert server.engine.submitted == []
    await leases.check(leases.taken.total())
    assert server.service.gate.active == 0


async def test_server_that_drains_gives_leases_back(server: Running, leases: CountedLeases) -> None:
    server.service.gate.draining = True
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 503
    await leases.check(1)


async def test_engine_that_refuses_or_dies_gives_leases_back(
    server: Running, leases: CountedLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.refusal = "it is broken"
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 500
    await leases.check(1)
    server.engine.refusal = None
    server.engine.dies_after = 1
    await server.http.post(CHAT, json=body(model="formal", stream=True))
    await leases.check(2)

    def submit(request: Request) -> None:
        raise EngineError("it is gone")

    monkeypatch.setattr(server.engine, "submit", submit)
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 503
    await leases.check(3)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_hangs_up_gives_its_lease_back(server: Running, leases: CountedLeases, stream: bool) -> None:
    server.engine.open.clear()
    asking = asyncio.create_task(server.http.post(CHAT, json=body(model="formal", stream=stream)))
    await until(lambda: bool(server.engine.submitted), "the request is submitted")
    assert leases.released.total() == 0
    asking.cancel()
    await leases.check(1)
    assert server.service.gate.active == 0


async def test_stopped_server_gives_leases_back(server: Running, leases: CountedLeases) -> None:
    server.engine.open.clear()
    asking = asyncio.create_task(server.http.post(CHAT, json=body(model="formal")))
    await until(lambda: bool(server.engine.submitted), "the request is submitted")
    server.service.stop_all()
    assert (await asking).status_code == 503
    await leases.check(1)


async def test_lease_is_given_back_once_however_often_it_is_closed(server: Running, leases: CountedLeases) -> None:
    lease = server.service.resolver.leases.take(adapter(server))
    lease.close()
    lease.close()
    with lease:
        lease.submitted()
    await leases.check(1)


async def test_removal_waits_for_submission_and_not_for_the_end(server: Running) -> None:
    given: AdapterLeases = server.service.resolver.leases
    ref = adapter(server)
    first = given.take(ref)
    second = given.take(ref)
    waiting = asyncio.create_task(given.all_submitted(ref.digest))
    first.submitted()
    await asyncio.sleep(0)
    assert not waiting.done()
    second.close()
    await asyncio.wait_for(waiting, 5)
    await given.all_submitted(ref.digest)
    first.close()


async def test_version_without_a_name_cannot_be_leased(server: Running) -> None:
    ref = adapter(server)
    server.service.catalog.remove("formal")
    with pytest.raises(VersionChanged, match="formal"):
        server.service.resolver.leases.take(ref)


async def test_version_that_is_replaced_between_lookup_and_lease_is_looked_up_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = adapter(server)
    catalog = server.service.catalog
    resolve = server.service.models.resolve

    def resolve_and_replace(*arguments: Any) -> Any:
        target = resolve(*arguments)
        if target.adapter == old:
            catalog.register("formal", str(server.sources / "pirate"), replace=True)
        return target

    monkeypatch.setattr(server.service.models, "resolve", resolve_and_replace)
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 200
    (request,) = server.engine.submitted
    assert request.digest == adapter(server).digest != old.digest
