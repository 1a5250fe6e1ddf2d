"""Counts requests of tenants against their limits and adds up their usage. One thread writes to the database."""

import logging
import math
import queue
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import bindparam, case, delete, select, update
from sqlalchemy.engine import Connection

from lorikeet.tenants.keys import ApiKey
from lorikeet.tenants.store import COUNTERS, RUNNING, USAGE, StoreUnavailable, TenantStore

_LOG = logging.getLogger(__name__)

_MOST_AT_ONCE = 500
_LEASE_S = 30.0
_RENEW_S = 10.0
_TICK_S = 2.0
_RETRY_S = 0.5
_CLOSE_S = 10.0
"""Most seconds that a stopping server tries to write its last counts."""
MINUTE_S = 60
DAY_S = 86400
_USAGE_KEY = [column.name for column in USAGE.primary_key]
_USAGE_COUNTS = [column.name for column in USAGE.c if not column.primary_key]


class LimitState(NamedTuple):
    """The state of a limit in the present window.

    Attributes:
        limit: largest count in a window.
        remaining: remaining count in this window.
        reset_s: seconds until the window ends.
    """

    limit: int
    remaining: int
    reset_s: float


class Admission(NamedTuple):
    """The answer to a request for admission.

    Attributes:
        grant: the granted places; None after a refusal.
        requests: state of the limit on requests; None without a limit.
        tokens: state of the limit on tokens with the smaller remaining count; None without a limit.
        retry_after_s: seconds after which a retry may be admitted.
        reason: reason of the refusal.
    """

    grant: "Grant | None"
    requests: LimitState | None
    tokens: LimitState | None
    retry_after_s: float = 0.0
    reason: str = ""


class Grant(NamedTuple):
    """The places that were granted to one request.

    Attributes:
        key_id: id of the request's key.
        sequences: number of the request's sequences.
        tokens: tokens counted in the windows ``minute`` and ``day``.
        is_concurrent: whether the sequences count against the limit on concurrent requests.
    """

    key_id: str
    sequences: int
    tokens: int
    minute: int
    day: int
    is_concurrent: bool


class Ended(NamedTuple):
    """A sequence that has ended, with fields of the request log.

    Attributes:
        unix_s: time of arrival.
        base: name of the base model; empty for the ledger's.
    """

    tenant: str
    adapter: str
    unix_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    is_aborted: bool
    has_failed: bool
    base: str = ""


class _Ask(NamedTuple):
    key: ApiKey
    sequences: int
    tokens: int
    is_concurrent: bool
    answer: "Future[Admission]"


class _Release(NamedTuple):
    grant: Grant
    used_tokens: int


class _Flush(NamedTuple):
    done: "Future[None]"


_Work = _Ask | _Release | Ended | _Flush


@dataclass
class _Counts:
    """A row of counters, with the numbers of running sequences on all servers and on this one."""

    minute: int
    requests: int
    minute_tokens: int
    day: int
    day_tokens: int
    running: int = 0
    running_here: int = 0


class Ledger:
    """Admits requests of keys with limits, and adds up usage.

    Args:
        store: the database.
        base: name of the base model in the usage.
        now: returns the present Unix time in seconds.
        on_tick: function that the thread calls every two seconds.
    """

    def __init__(
        self,
        store: TenantStore,
        base: str,
        now: Callable[[], float] = time.time,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._base = base
        self._now = now
        self._on_tick = on_tick
        self._server = secrets.token_hex(8)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._kept: list[_Work] = []
        self._renewed_s = self._ticked_s = time.monotonic()
        self._has_run = False
        self._ends_s = math.inf
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="tenants", daemon=True)
        self._thread.start()

    def ask(self, key: ApiKey, sequences: int, tokens: int, *, is_concurrent: bool = True) -> "Future[Admission]":
        """Request the admission of a request.

        Args:
            key: a key with limits.
            sequences: number of the request's sequences.
            tokens: tokens of the prompts plus the token limits of the answers.
            is_concurrent: whether the sequences count against the limit on concurrent requests.

        Returns:
            A future of the answer. Its exception is StoreUnavailable if the database cannot be reached.
        """
        answer: Future[Admission] = Future()
        self._work.put(_Ask(key, sequences, tokens, is_concurrent, answer))
        return answer

    def release(self, grant: Grant, used_tokens: int) -> None:
        """Release the places and the unused tokens of an ended request."""
        self._work.put(_Release(grant, used_tokens))

    def ended(self, ended: Ended) -> None:
        """Add an ended sequence to the usage of its tenant."""
        self._work.put(ended)

    def flush(self) -> "Future[None]":
        """Return a future that is done when all earlier changes have been written."""
        done: Future[None] = Future()
        self._work.put(_Flush(done))
        return done

    def close(self) -> None:
        """Write the last counts and end the thread. Without the database, give up after ten seconds."""
        self._ends_s = time.monotonic() + _CLOSE_S
        self._work.put(None)
        self._thread.join()

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        is_ending = False
        while not (is_ending and not self._kept):
            fresh: list[_Work] = []
            if not is_ending:
                is_ending = self._take(fresh)
            try:
                self._apply(fresh)
            except Exception as error:  # The thread must continue after any exception of a driver.
                if not self._is_down:
                    self._is_down = True
                    _LOG.error("the database of keys cannot be written: %s", error)
                self._put_off(fresh, error)
                if time.monotonic() > self._ends_s:
                    _LOG.error("usage of %d ends is lost: the database cannot be written", len(self._kept))
                    break
                time.sleep(_RETRY_S)
            else:
                if self._is_down:
                    self._is_down = False
                    _LOG.info("the database of keys can be written again")
            self._tick()
        try:
            self._store.forget_server(self._server)
        except StoreUnavailable as error:
            _LOG.warning("running sequences of this server could not be removed: %s", error)

    def _take(self, fresh: list[_Work]) -> bool:
        """Wait for work and take all of it. Return whether the thread should end."""
        try:
            first = self._work.get(timeout=_RETRY_S if self._kept else _TICK_S)
        except queue.Empty:
            return False
        while first is not None:
            fresh.append(first)
            if len(fresh) >= _MOST_AT_ONCE or self._work.empty():
                return False
            first = self._work.get()
        return True

    def _put_off(self, fresh: list[_Work], error: Exception) -> None:
        """Keep the ended sequences for later, and refuse the waiting requests."""
        for each in fresh:
            match each:
                case _Ask():
                    each.answer.set_exception(StoreUnavailable(str(error)))
                case _Flush():
                    each.done.set_exception(StoreUnavailable(str(error)))
                case _:
                    self._kept.append(each)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s < _TICK_S:
            return
        self._ticked_s = now_s
        try:
            if self._has_run and now_s - self._renewed_s > _RENEW_S:
                self._renewed_s = now_s
                self._renew()
            self._on_tick()
        except Exception as error:
            _LOG.warning("keys cannot be read: %s", error)

    def _renew(self) -> None:
        now = self._now()
        with self._store.transaction() as connection:
            mine = RUNNING.c.server == self._server
            connection.execute(update(RUNNING).where(mine).values(until=now + _LEASE_S))
            connection.execute(delete(RUNNING).where(~mine, RUNNING.c.until < now - DAY_S))

    def _apply(self, fresh: list[_Work]) -> None:
        work = self._kept + fresh
        if not work:
            return
        now = self._now()
        ids = {each.key.key_id for each in fresh if isinstance(each, _Ask)}
        ids |= {each.grant.key_id for each in work if isinstance(each, _Release)}
        answers: list[tuple[_Ask, Admission]] = []
        usage: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        with self._store.transaction() as connection:
            counts = self._locked(connection, sorted(ids), now)
            for each in work:
                match each:
                    case _Ask():
                        answers.append((each, _admit(each, counts[each.key.key_id], now)))
                    case _Release():
                        _give_back(each, counts[each.grant.key_id])
                    case Ended():
                        base = each.base or self._base
                        usage[_day(each.unix_s), each.tenant, base, each.adapter].update(_usage(each))
                    case _Flush():
                        pass
            self._write_counts(connection, counts, now)
            self._write_usage(connection, usage)
        self._kept = []
        for ask, answer in answers:
            ask.answer.set_result(answer)
        for each in fresh:
            if isinstance(each, _Flush):
                each.done.set_result(None)

    def _locked(self, connection: Connection, ids: list[str], now: float) -> dict[str, _Counts]:
        """Lock the rows of keys in the order of their ids, begin new windows, and return the counts."""
        if not ids:
            return {}
        fresh = {"minute": int(now // MINUTE_S), "day": int(now // DAY_S)}
        zero = dict.fromkeys(("requests", "minute_tokens", "day_tokens"), 0)
        insert = self._store.insert(COUNTERS).values([{"key_id": key_id, **fresh, **zero} for key_id in ids])

        def kept(window: str, count: str) -> Any:
            return case((COUNTERS.c[window] >= insert.excluded[window], COUNTERS.c[count]), else_=0)

        def latest(window: str) -> Any:  # A server with a slow clock does not begin an old window again.
            newer = COUNTERS.c[window] >= insert.excluded[window]
            return case((newer, COUNTERS.c[window]), else_=insert.excluded[window])

        statement = insert.on_conflict_do_update(
            index_elements=["key_id"],
            set_={
                "minute": latest("minute"),
                "requests": kept("minute", "requests"),
                "minute_tokens": kept("minute", "minute_tokens"),
                "day": latest("day"),
                "day_tokens": kept("day", "day_tokens"),
            },
        ).returning(COUNTERS)
        counts = {row.key_id: _Counts(*row[1:]) for row in connection.execute(statement)}
        running = select(RUNNING).where(RUNNING.c.key_id.in_(ids), RUNNING.c.until > now)
        for row in connection.execute(running):
            counts[row.key_id].running += row.sequences
            if row.server == self._server:
                counts[row.key_id].running_here += row.sequences
        return counts

    def _write_counts(self, connection: Connection, counts: dict[str, _Counts], now: float) -> None:
        if not counts:
            return
        connection.execute(
            update(COUNTERS)
            .where(COUNTERS.c.key_id == bindparam("of"))
            .values({name: bindparam(name) for name in ("requests", "minute_tokens", "day_tokens")}),
            [
                {"of": key_id, "requests": c.requests, "minute_tokens": c.minute_tokens, "day_tokens": c.day_tokens}
                for key_id, c in counts.items()
            ],
        )
        self._has_run = True
        upsert = self._store.insert(RUNNING)
        connection.execute(
            upsert.on_conflict_do_update(
                index_elements=["key_id", "server"],
                set_={"sequences": upsert.excluded.sequences, "until": upsert.excluded.until},
            ),
            [
                {"key_id": key_id, "server": self._server, "sequences": c.running_here, "until": now + _LEASE_S}
                for key_id, c in counts.items()
            ],
        )

    def _write_usage(self, connection: Connection, usage: dict[tuple[str, ...], "Counter[str]"]) -> None:
        if not usage:
            return
        upsert = self._store.insert(USAGE)
        connection.execute(
            upsert.on_conflict_do_update(
                index_elements=_USAGE_KEY,
                set_={name: USAGE.c[name] + upsert.excluded[name] for name in _USAGE_COUNTS},
            ),
            [
                {
                    **dict(zip(_USAGE_KEY, of, strict=True)),
                    **{name: added[name] for name in _USAGE_COUNTS},
                }
                for of, added in sorted(usage.items())
            ],
        )


def _admit(ask: _Ask, counts: _Counts, now: float) -> Admission:
    """Take places from the counts of a key, or return the time until places may be free."""
    limits = ask.key.settings
    waits = list[float]()
    reasons = list[str]()
    minute_left_s = (counts.minute + 1) * MINUTE_S - now
    day_left_s = (counts.day + 1) * DAY_S - now
    checks = (
        (limits.requests_per_minute, counts.requests, ask.sequences, minute_left_s, "requests per minute"),
        (limits.tokens_per_minute, counts.minute_tokens, ask.tokens, minute_left_s, "tokens per minute"),
        (limits.tokens_per_day, counts.day_tokens, ask.tokens, day_left_s, "tokens per day"),
        (limits.concurrent_requests, counts.running, ask.sequences * ask.is_concurrent, 1.0, "concurrent requests"),
    )
    for limit, used, wanted, wait_s, unit in checks:
        if limit and wanted and used + wanted > limit:
            waits.append(wait_s)
            reasons.append(f"{wanted} more than the {used} in use would pass the limit of {limit} {unit}")
    grant = None
    if not waits:
        grant = Grant(ask.key.key_id, ask.sequences, ask.tokens, counts.minute, counts.day, ask.is_concurrent)
        counts.requests += ask.sequences
        counts.minute_tokens += ask.tokens
        counts.day_tokens += ask.tokens
        counts.running += ask.sequences * ask.is_concurrent
        counts.running_here += ask.sequences * ask.is_concurrent
    tokens = [
        _state(limits.tokens_per_minute, counts.minute_tokens, minute_left_s),
        _state(limits.tokens_per_day, counts.day_tokens, day_left_s),
    ]
    return Admission(
        grant,
        _state(limits.requests_per_minute, counts.requests, minute_left_s),
        min(filter(None, tokens), key=lambda state: state.remaining, default=None),
        max(waits, default=0.0),
        "; ".join(reasons),
    )


def _state(limit: int, used: int, reset_s: float) -> LimitState | None:
    return LimitState(limit, max(0, limit - used), reset_s) if limit else None


def _give_back(release: _Release, counts: _Counts) -> None:
    grant = release.grant
    unused = release.grant.tokens - release.used_tokens
    if grant.minute == counts.minute:
        counts.minute_tokens = max(0, counts.minute_tokens - unused)
    if grant.day == counts.day:
        counts.day_tokens = max(0, counts.day_tokens - unused)
    if grant.is_concurrent:
        taken = min(grant.sequences, counts.running_here)
        counts.running -= taken
        counts.running_here -= taken


def _usage(ended: Ended) -> dict[str, int]:
    return {
        "requests": 1,
        "aborted": int(ended.is_aborted),
        "failed": int(ended.has_failed),
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "completion_tokens": ended.completion_tokens,
    }


def _day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")


def never_fits(key: ApiKey, sequences: int, tokens: int, *, is_concurrent: bool) -> str:
    """Return why a request could never be admitted; empty if it could be."""
    limits = key.settings
    checks: Iterable[tuple[int, int, str]] = (
        (limits.requests_per_minute, sequences, "requests per minute"),
        (limits.tokens_per_minute, tokens, "tokens per minute, its prompt and max_tokens counted"),
        (limits.tokens_per_day, tokens, "tokens per day, its prompt and max_tokens counted"),
        (limits.concurrent_requests, sequences * is_concurrent, "concurrent requests"),
    )
    return next(
        (f"it asks for {wanted} of at most {most} {unit}" for most, wanted, unit in checks if 0 < most < wanted), ""
    )
