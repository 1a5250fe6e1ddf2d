"""Keys of tenants: what they may see, use and load, how much, and that what they used is counted."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lorikeet.adapters.registry import sqlite_url
from lorikeet.cli.app import app
from lorikeet.config import AdapterDirMode, ConfigError, load_settings
from lorikeet.http.auth import key_name
from lorikeet.http.tenancy import duration
from lorikeet.observe.request_log import RequestLog
from lorikeet.tenants.keys import ApiKey, KeySettings
from lorikeet.tenants.ledger import DAY_S, MINUTE_S, Ended
from lorikeet.tenants.store import StoreUnavailable, UnknownKey
from lorikeet.tenants.tenants import Tenants
from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, bearer, body
from tests.support.waiting import until

ADMIN = {"api_keys": ("plain",), "admin_keys": ("boss",)}
ANSWER_TOKENS = len(TOKENIZER.encode("hello world").ids) + 1
COMPLETIONS = "/v1/completions"
NOON = 1_800_000_000 // DAY_S * DAY_S + 43_200


class Clock:
    """Unix seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.unix_s = float(NOON)

    def __call__(self) -> float:
        return self.unix_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_tenants(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Tenants]]:
    """Opens a server's tenants on one SQLite file, or on a URL."""
    opened: list[Tenants] = []

    def one(url: str = "") -> Tenants:
        (tmp_path / "store").mkdir(exist_ok=True)
        opened.append(Tenants(url or sqlite_url(tmp_path / "store" / "registry.sqlite3"), "base", clock))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def make(tenants: Tenants, name: str = "acme", **settings: Any) -> tuple[ApiKey, str]:
    return tenants.create(name, KeySettings(**settings), "boss")


async def complete(server: Running, secret: str, model: str = "base", **fields: Any) -> httpx.Response:
    asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, **fields}
    # A connection that is used again may be closed just then.
    return await server.http.post(COMPLETIONS, json=asked, headers={**bearer(secret), "Connection": "close"})


def register(server: Running, *names: str) -> None:
    for name in names:
        server.service.catalog.register(name, str(server.sources / "formal"))


# --- keys -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_keys_are_made_changed_rotated_and_revoked_over_http(
    start: Start, open_tenants: Callable[..., Tenants], tmp_path: Path, clock: Clock
) -> None:
    boss = bearer("boss")
    async with start(tenants=open_tenants(), **ADMIN) as server:
        made = await server.http.post("/v1/keys", json={"name": "acme"}, headers=boss)
        key = made.json()["id"]
        secret = made.json()["secret"]
        assert (made.status_code, (await complete(server, secret)).status_code) == (201, 200)
        listed = (await server.http.get("/v1/keys", headers=boss)).json()["data"]
        assert [(each["id"], each["name"], each["revoked"]) for each in listed] == [(key, "acme", None)]
        assert secret not in json.dumps(listed)
        changed = await server.http.patch(f"/v1/keys/{key}", json={"settings": {"priority": 3}}, headers=boss)
        assert changed.json()["settings"]["priority"] == 3
        wrong = await server.http.patch(f"/v1/keys/{key}", json={"settings": {"prio": 3}}, headers=boss)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "settings")
        rotated = await server.http.post(f"/v1/keys/{key}/rotate", json={"overlap_s": 60}, headers=boss)
        fresh = rotated.json()["secret"]
        assert [(await complete(server, each)).status_code for each in (secret, fresh)] == [200, 200]
        clock.unix_s += 61
        assert [(await complete(server, each)).status_code for each in (secret, fresh)] == [401, 200]
        assert (await server.http.delete(f"/v1/keys/{key}", headers=boss)).status_code == 200
        assert (await complete(server, fresh)).status_code == 401
        assert (await server.http.delete(f"/v1/keys/{key}", headers=boss)).status_code == 404
        entries = (await server.http.get("/v1/audit", headers=boss)).json()["data"]
        actions = ["key revoked", "key rotated", "key changed", "key created"]
        assert [entry["action"] for entry in entries] == actions
        assert {entry["actor"] for entry in entries} == {key_name("boss")}
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        content = file.read_bytes()
        assert not any(each.encode() in content for each in (secret, fresh)), file


@pytest.mark.slow
async def test_tenant_may_call_only_listed_routes(start: Start, open_tenants: Callable[..., Tenants]) -> None:
    tenants = open_tenants()
    _, secret = make(tenants)
    async with start(tenants=tenants, **ADMIN) as server:
        described = (await server.http.get("/openapi.json", headers=bearer("boss"))).json()["paths"]
        refused = ["/v1/keys", "/v1/audit", "/v1/cluster", "/metrics", "/reset_prefix_cache", "/server_info"]
        for path in refused:
            method = next(iter(described[path]))
            assert (await server.http.request(method, path, headers=bearer(secret))).status_code == 403, path
        for path in ("/health", "/v1/models", "/v1/adapters", "/v1/usage", "/docs", "/version"):
            assert (await server.http.get(path, headers=bearer(secret))).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/v1/keys"):
            assert (await server.http.get(path)).status_code == 401, path
        assert (await server.http.get("/v1/keys", headers=bearer("plain"))).status_code == 403
        assert (await complete(server, "plain")).status_code == 200, "keys of the command line remain"


def test_tenants_need_an_admin_key() -> None:
    with pytest.raises(ConfigError, match="admin_keys"):
        load_settings({"server": {"tenants": True}}, environment={})


def test_other_server_sees_a_change_at_its_next_read(open_tenants: Callable[..., Tenants]) -> None:
    one = open_tenants()
    other = open_tenants()
    key, secret = make(one)
    other.refresh()
    assert other.find(secret) == key
    one.revoke(key.key_id, "boss")
    other.refresh()
    assert other.find(secret) is None
    with pytest.raises(UnknownKey):
        other.rotate(key.key_id, 0.0, "boss")


# --- scopes -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_foreign_names_do_not_exist(start: Start, open_tenants: Callable[..., Tenants]) -> None:
    tenants = open_tenants()
    _, secret = make(tenants, use=("acme/*",), see=("base",))
    async with start(tenants=tenants, **ADMIN) as server:
        register(server, "acme/a", "globex/b")
        models = (await server.http.get("/v1/models", headers=bearer(secret))).json()["data"]
        assert [each["id"] for each in models] == ["base", "acme/a"]
        loras = (await server.http.get("/v1/loras", headers=bearer(secret))).json()["loras"]
        listed = (await server.http.get("/v1/adapters", headers=bearer(secret))).json()
        assert (list(loras), [each["name"] for each in listed["data"]], listed["total"]) == (["acme/a"], ["acme/a"], 1)
        record = server.service.catalog.get("globex/b")
        assert record is not None
        digest = record.digest
        names = ("globex/b", "base:globex/b", f"globex/b@{digest[:12]}")
        assert (await complete(server, secret, "acme/a*0.5+globex/b*0.5")).status_code == 404, "a mixture"
        for path in ("/v1/embeddings", "/v1/classify"):
            content = {"model": "globex/b", "input": "x"}
            assert (await server.http.post(path, json=content, headers=bearer(secret))).status_code == 404, path
        for name in names:
            foreign = await complete(server, secret, name)
            missing = await complete(server, secret, f"{name}x")
            assert foreign.status_code == missing.status_code == 404
            assert foreign.text == missing.text.replace(f"{name}x", name)
        for method, path in (
            ("GET", "/v1/models/globex/b"),
            ("GET", "/v1/adapters/globex/b"),
            ("DELETE", "/v1/adapters/globex/b"),
            ("GET", "/v1/adapters/globex/b/stats"),
            ("PATCH", "/v1/adapters/globex/b"),
        ):
            content = {"warm": True} if method == "PATCH" else None
            reply = await server.http.request(method, path, headers=bearer(secret), json=content)
            assert reply.status_code == 404, (method, path)
        assert (await complete(server, secret, "base")).status_code == 403, "seen, not used"
        for mixture in ("globex/b*1", "acme/a*1+globex/b*1", "1*0.5"):
            reply = await complete(server, secret, mixture)
            assert reply.status_code == 404, mixture
            assert "globex" not in reply.text or "globex" in mixture, "an index counts what the key may see"
        assert (await complete(server, secret, "acme/a")).status_code == 200
        asked = {"model": "globex/b", "prompt": "x" * 70_000}
        large = await server.http.post(COMPLETIONS, json=asked, headers=bearer(secret), timeout=None)
        assert large.status_code == 404, "read in another process"
        assert {request.adapter and request.adapter.name for request in server.engine.submitted} == {"acme/a"}


async def test_adapter_that_a_key_may_see_but_not_load_is_a_403(
    start: Start, open_tenants: Callable[..., Tenants]
) -> None:
    tenants = open_tenants()
    _, secret = make(tenants, use=("formal",), see=("json*",))
    async with start(adapters={"adapter_dir_mode": AdapterDirMode.SERVE}, tenants=tenants, **ADMIN) as server:
        listed = (await server.http.get("/v1/models", headers=bearer(secret))).json()["data"]
        assert [each["id"] for each in listed] == ["formal", "json"]
        for name, status in {"json": 403, "base:json": 403, "json*0.5": 403, "jsonx": 404, "pirate": 404}.items():
            assert (await complete(server, secret, name)).status_code == status, name
        assert server.service.catalog.get("json") is None


@pytest.mark.slow
async def test_tenant_owns_its_adapters_within_its_quota(start: Start, open_tenants: Callable[..., Tenants]) -> None:
    tenants = open_tenants()
    (key, secret), (_, other) = (make(tenants, name, load=("*a*",), max_adapters=2) for name in ("one", "two"))

    async with start(tenants=tenants, **ADMIN) as server:

        async def add(name: str, source: str, by: str = secret, **fields: Any) -> httpx.Response:
            asked = {"name": name, "source": source, **fields}
            return await server.http.post("/v1/adapters", json=asked, headers=bearer(by))

        added = await add("a1", "formal", "boss")
        assert (added.status_code, "owner" in added.json()) == (201, False)
        assert (await add("a2", "pirate")).json()["owner"] == key.key_id
        assert (await add("b", "pirate")).status_code == 403, "no such name"
        assert (await add("a3", "json")).status_code == 403, "no such folder"
        assert (await add("a3", "../sources/pirate")).status_code == 403
        assert (await add("a1", "pirate", replace=True)).status_code == 403, "the operator's"
        assert (await add("a2", "pirate", other, replace=True)).status_code == 403, "another tenant's"
        assert (await add("a4", "pirate", secret)).status_code == 201
        full = await add("a5", "pirate")
        assert (full.status_code, "may own 2 adapters" in full.text) == (403, True)
        assert "a5" not in server.service.catalog.names()
        for by, status in ((other, 403), (secret, 200)):
            reply = await server.http.delete("/v1/adapters/a4", headers=bearer(by))
            assert reply.status_code == status
        assert (await add("a5", "pirate")).status_code == 201, "there is room again"
        pinned = await server.http.patch("/v1/adapters/a5", json={"pinned": True}, headers=bearer(secret))
        assert pinned.status_code == 403
        rows = (await server.http.get("/v1/audit?subject=a4", headers=bearer("boss"))).json()["data"]
        assert [(row["actor"], row["action"]) for row in rows] == [
            (key.key_id, "adapter removed"),
            (key.key_id, "adapter added"),
        ]


# --- limits -----------------------------------------------------------------------------------------


def test_durations_are_spelled_as_openais() -> None:
    assert [duration(each) for each in (0.0, 0.2, 59.5, 60, 3725)] == ["0s", "1s", "1m0s", "1m0s", "1h2m5s"]


async def test_429_has_retry_after_and_headers_have_the_remaining_limits(
    start: Start, open_tenants: Callable[..., Tenants], clock: Clock
) -> None:
    tenants = open_tenants()
    _, secret = make(tenants, requests_per_minute=2, tokens_per_minute=100)
    clock.unix_s = NOON + 17.5
    async with start(tenants=tenants, **ADMIN) as server:
        first = await complete(server, secret)
        got = {name: first.headers[name] for name in first.headers if name.startswith("x-ratelimit")}
        assert got == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-reset-requests": "43s",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "93",
            "x-ratelimit-reset-tokens": "43s",
        }
        assert (await complete(server, secret)).status_code == 200
        refused = await complete(server, secret)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "43")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        clock.unix_s += 42
        assert (await complete(server, secret)).status_code == 429
        clock.unix_s += 1
        assert (await complete(server, secret)).status_code == 200
        never = await complete(server, secret, max_tokens=98)
        assert (never.status_code, "tokens per minute" in never.text) == (400, True)
        assert "x-ratelimit-limit-requests" not in (await complete(server, "plain")).headers


async def test_unused_tokens_are_given_back(start: Start, open_tenants: Callable[..., Tenants]) -> None:
    tenants = open_tenants()
    _, secret = make(tenants, tokens_per_minute=60)
    async with start(tenants=tenants, **ADMIN) as server:
        used = 3 + ANSWER_TOKENS
        for number in range(60 // used):
            reply = await complete(server, secret, max_tokens=57 - number * used)
            assert (reply.status_code, reply.json()["usage"]["total_tokens"]) == (200, used)


async def test_sequences_at_once_are_limited_and_a_client_that_hangs_up_frees_its_place(
    start: Start, open_tenants: Callable[..., Tenants]
) -> None:
    tenants = open_tenants()
    _, secret = make(tenants, concurrent_requests=2)
    async with start(tenants=tenants, **ADMIN) as server:
        server.engine.open.clear()
        waiting = [asyncio.create_task(complete(server, secret)) for _ in range(2)]
        await until(lambda: len(server.engine.submitted) == 2, "two run")
        refused = await complete(server, secret)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        waiting[0].cancel()
        await until(lambda: server.service.gate.active == 1, "one has hung up")
        third = asyncio.create_task(complete(server, secret))
        await until(lambda: len(server.engine.submitted) == 3, "a third runs")
        server.engine.open.set()
        assert [(await each).status_code for each in (waiting[1], third)] == [200, 200]


async def test_without_the_database_limited_keys_wait_and_ends_are_kept(
    start: Start, open_tenants: Callable[..., Tenants], monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = open_tenants()
    _, limited = make(tenants, requests_per_minute=5)
    free_key, free = make(tenants)

    def fail() -> Any:
        raise StoreUnavailable("gone")

    async with start(tenants=tenants, **ADMIN) as server:
        monkeypatch.setattr(tenants.store, "transaction", fail)
        monkeypatch.setattr("lorikeet.tenants.ledger._RETRY_S", 0.01)
        reply = await complete(server, limited)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert (await complete(server, free)).status_code == 200
        monkeypatch.undo()
        rows = (await server.http.get("/v1/usage", headers=bearer("boss"))).json()["data"]
        assert [(row["key"], row["requests"]) for row in rows] == [(free_key.key_id, 1)]


async def test_priority_weight_and_cache_group_reach_the_engine(
    start: Start, open_tenants: Callable[..., Tenants]
) -> None:
    tenants = open_tenants()
    _, alone = make(tenants, "alone", priority=5, weight=2.0)
    groups = [make(tenants, name, cache_group="team")[1] for name in ("one", "two")]
    async with start(tenants=tenants, **ADMIN) as server:
        for secret, priority in ((alone, -3), (alone, 2), (groups[0], 0), (groups[1], 0), ("plain", -3)):
            reply = await server.http.post(CHAT, json=body(priority=priority), headers=bearer(secret))
            assert reply.status_code == 200
        sent = server.engine.submitted
    assert [request.priority for request in sent] == [5, 7, 0, 0, -3]
    assert [request.tenant_weight for request in sent] == [2.0, 2.0, 1.0, 1.0, 1.0]
    salts = [request.cache_salt for request in sent]
    assert salts[2] == salts[3]
    assert len({salts[0], salts[2], salts[4]}) == 3


# --- the whole --------------------------------------------------------------------------------------


class Tenant:
    """What a random tenant may do, and what it has used by a plain count of this test."""

    def __init__(self, random: random.Random, number: int) -> None:
        team = f"team{number % 12}"
        limits: dict[str, Any] = {
            "requests_per_minute": random.choice([0, 2, 4]),
            "tokens_per_minute": random.choice([0, 22, 45]),
            "tokens_per_day": random.choice([0, 0, 60]),
        }
        use = random.choice([("*",), (f"{team}/*",), (f"{team}/*", "shared"), ("base",)])
        self.settings = KeySettings(use=use, see=random.choice([(), ("shared",)]), **limits)
        self.minute = -1
        self.requests = 0
        self.minute_tokens = 0
        self.day_tokens = 0
        self.secret = self.key_id = ""

    def expected(self, model: str, max_tokens: int, choices: int, now: float) -> int:
        """Return the status of a request, and count it."""
        if not self._matches(self.settings.use, model):
            return 403 if self._matches(self.settings.see, model) else 404
        limits = self.settings
        asked = choices * (3 + max_tokens)
        if (0 < limits.requests_per_minute < choices) or any(
            0 < limit < asked for limit in (limits.tokens_per_minute, limits.tokens_per_day)
        ):
            return 400
        if int(now // MINUTE_S) != self.minute:
            self.minute = int(now // MINUTE_S)
            self.requests = 0
            self.minute_tokens = 0
        checks = (
            (limits.requests_per_minute, self.requests + choices),
            (limits.tokens_per_minute, self.minute_tokens + asked),
            (limits.tokens_per_day, self.day_tokens + asked),
        )
        if any(0 < limit < wanted for limit, wanted in checks):
            return 429
        used = choices * (3 + min(max_tokens, ANSWER_TOKENS))
        self.requests += choices
        self.minute_tokens += used
        self.day_tokens += used
        return 200

    @staticmethod
    def _matches(patterns: tuple[str, ...], name: str) -> bool:
        return any(each in ("*", name) or (each.endswith("/*") and name.startswith(each[:-1])) for each in patterns)


@pytest.mark.long
@pytest.mark.slow
async def test_limits_and_usage_of_sixty_tenants_survive_a_restart(
    start: Start, open_tenants: Callable[..., Tenants], clock: Clock, tmp_path: Path
) -> None:
    chance = random.Random(7)
    tenants = [Tenant(chance, number) for number in range(60)]
    names = ["base", "shared", *(f"team{number}/a" for number in range(12))]
    log_path = tmp_path / "requests.jsonl"
    statuses = Counter[int]()
    bills: list[dict[str, Any]] = []
    for life in range(2):
        log = RequestLog(log_path, max_bytes=10**8, keep=1)
        opened = open_tenants()
        async with start(tenants=opened, request_log=log, **ADMIN) as server:
            if not life:
                register(server, *names[1:])
            for number, tenant in enumerate(tenants):
                if not life:
                    key, tenant.secret = opened.create(str(number), tenant.settings, "boss")
                    tenant.key_id = key.key_id
            for _ in range(150):
                tenant = chance.choice(tenants)
                mine = [name for name in names if Tenant._matches(tenant.settings.use, name)]
                model = chance.choice(mine if mine and chance.random() < 0.8 else names)
                max_tokens = chance.choice([1, 4, 20])
                choices = chance.choice([1, 1, 2])
                expected = tenant.expected(model, max_tokens, choices, clock())
                reply = await complete(server, tenant.secret, model, max_tokens=max_tokens, n=choices)
                assert reply.status_code == expected, (tenant.settings, model, reply.text)
                statuses[expected] += 1
                clock.unix_s += chance.choice([0.0, 0.5, 2.0])
            bills = (await server.http.get("/v1/usage", headers=bearer("boss"), params=_all_days())).json()["data"]
            own = tenants[0]
            answer = await server.http.get("/v1/usage", headers=bearer(own.secret), params=_all_days())
            assert answer.json()["data"] == [row for row in bills if row["key"] == own.key_id]
        opened.close()
        log.close()
    assert min(statuses[each] for each in (200, 400, 404, 429)) > 5, statuses
    by_id = {tenant.key_id: tenant for tenant in tenants}
    logged = Counter[tuple[Any, ...]]()
    billed = Counter[tuple[Any, ...]]()
    for line in map(json.loads, log_path.read_text().splitlines()):
        assert Tenant._matches(by_id[line["tenant"]].settings.use, line["adapter"] or "base")
        _add(logged, line["tenant"], line["adapter"], 1, line["input_tokens"], line["output_tokens"])
    for row in bills:
        _add(billed, row["key"], row["adapter"], row["requests"], row["prompt_tokens"], row["completion_tokens"])
    assert billed == logged


def _all_days() -> dict[str, str]:
    return {"start": "2000-01-01", "end": "2100-01-01"}


def _add(to: "Counter[tuple[Any, ...]]", tenant: str, adapter: str | None, *counts: int) -> None:
    for number, count in enumerate(counts):
        to[tenant, adapter, number] += count


@pytest.mark.slow
async def test_two_servers_that_share_postgresql_keep_limits_exactly(
    start: Start, open_tenants: Callable[..., Tenants], postgres_url: str
) -> None:
    one = open_tenants(postgres_url)
    two = open_tenants(postgres_url)
    used = 3 + 2  # what a request takes and what it uses are the same, so the order of ends does not matter
    limits = {"requests_per_minute": 40, "tokens_per_minute": 40 * used - 1, "concurrent_requests": 25}
    made = [make(one, f"tenant {number}", **limits) for number in range(4)]
    two.refresh()
    async with start(tenants=one, **ADMIN) as first, start(tenants=two, **ADMIN) as second:
        servers = (first, second)
        for each in servers:
            each.engine.open.clear()
        asked = [
            asyncio.create_task(complete(servers[number % 2], secret, max_tokens=2))
            for number in range(40)
            for _, secret in made
        ]
        await until(lambda: sum(len(each.engine.submitted) for each in servers) == 100, "25 of each run")
        for each in servers:
            each.engine.open.set()
        assert Counter([(await each).status_code for each in asked]) == {200: 100, 429: 60}
        asked = [
            asyncio.create_task(complete(servers[number % 2], secret, max_tokens=2))
            for number in range(20)
            for _, secret in made
        ]
        passed = [(await each).status_code for each in asked].count(200)
        assert passed == 4 * (39 - 25), "the 40th would pass the limit of tokens"
        one.ledger.flush().result()
        rows = (await second.http.get("/v1/usage", headers=bearer("boss"))).json()["data"]
    assert [row["requests"] for row in rows] == [39] * 4
    assert {row["prompt_tokens"] + row["completion_tokens"] for row in rows} == {39 * used}


def test_places_of_a_dead_server_are_released(open_tenants: Callable[..., Tenants], clock: Clock) -> None:
    one = open_tenants()
    two = open_tenants()
    key, _ = make(one, concurrent_requests=1)
    assert one.ledger.ask(key, 1, 1).result().grant is not None
    assert two.ledger.ask(key, 1, 1).result().grant is None
    clock.unix_s += 31
    assert two.ledger.ask(key, 1, 1).result().grant is not None


def test_slow_clock_does_not_restart_a_window(open_tenants: Callable[..., Tenants], clock: Clock) -> None:
    tenants = open_tenants()
    key, _ = make(tenants, requests_per_minute=1)
    assert tenants.ledger.ask(key, 1, 1).result().grant is not None
    clock.unix_s -= MINUTE_S
    late = tenants.ledger.ask(key, 1, 1).result()
    assert (late.grant, late.retry_after_s) == (None, 2 * MINUTE_S)


@pytest.mark.slow
async def test_the_commands_make_keys_and_write_usage(
    start: Start, open_tenants: Callable[..., Tenants], tmp_path: Path
) -> None:
    tenants = open_tenants()
    runner = CliRunner(env={"COLUMNS": "200"})
    async with start(tenants=tenants, **ADMIN) as server:
        where = ["--url", str(server.http.base_url), "--api-key", "boss"]

        async def run(*arguments: str) -> str:
            result = await asyncio.to_thread(runner.invoke, app, [*arguments, *where])
            assert result.exit_code == 0, result.output
            return result.stdout

        secret = (await run("keys", "create", "acme", "--use", "base", "--requests-per-minute", "7")).split()[-1]
        (key,) = tenants.list()
        assert (tenants.find(secret), key.settings.requests_per_minute) == (key, 7)
        assert (await complete(server, secret)).status_code == 200
        await run("keys", "change", key.key_id, "--max-adapter-size", "2GiB")
        assert tenants.list()[0].settings.max_adapter_bytes == 2 * 2**30
        assert "7 requests/min, 2.0 GiB of adapters" in await run("keys", "list")
        fresh = (await run("keys", "rotate", key.key_id, "--overlap", "0")).split()[-1]
        assert (tenants.find(secret), tenants.find(fresh)) == (None, tenants.list()[0])
        await run("usage", "--csv", str(tmp_path / "usage.csv"))
        head, row = (tmp_path / "usage.csv").read_text().splitlines()
        assert head.startswith("day,key,key_name,base,adapter,requests")
        assert row.split(",")[1:6] == [key.key_id, "acme", "base", "", "1"]
        await run("usage", "--json", str(tmp_path / "usage.json"))
        assert json.loads((tmp_path / "usage.json").read_text())[0]["requests"] == 1
        await run("keys", "revoke", key.key_id)
        await run("audit", key.key_id, "--json", str(tmp_path / "audit.json"))
        details = [entry["detail"] for entry in json.loads((tmp_path / "audit.json").read_text())]
        created = {"name": "acme", "settings": {"use": ["base"], "requests_per_minute": 7}}
        changed = {"settings": {"max_adapter_bytes": 2 * 2**30}}
        assert details == [{}, {"overlap_s": 0}, changed, created], "only what is not as before"
        assert "key revoked" in await run("audit", key.key_id)


def test_usage_counts_on_the_day_of_arrival(open_tenants: Callable[..., Tenants]) -> None:
    tenants = open_tenants()
    for unix_s in (NOON - 43_200.5, NOON - 43_199.5):
        tenants.ledger.ended(Ended("t", "", unix_s, 1, 0, 2, is_aborted=False, has_failed=False))
    tenants.ledger.flush().result()
    assert [row.requests for row in tenants.store.usage("2000", "2100")] == [1, 1]
