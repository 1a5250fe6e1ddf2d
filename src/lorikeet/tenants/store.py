"""Reads and writes the tables of tenants in the registry's database: keys, counters of limits, and usage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Column, Float, MetaData, String, Table, delete, func, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from lorikeet.adapters.audit import AUDIT, AuditEntry, note_change, read_changes
from lorikeet.adapters.registry import create_tables, insert_of, open_engine
from lorikeet.config import ConfigError
from lorikeet.tenants.keys import ApiKey, KeySettings, digest_of, new_key_id, new_secret

_CONNECT_S = 5
_TRIES = 100
"""Of a change that another server's gets in the way of."""

TABLES = MetaData()
_KEYS = Table(
    "api_keys",
    TABLES,
    Column("key_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("digest", String, nullable=False, unique=True),
    Column("settings", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("old_digest", String, nullable=False),
    Column("old_until", Float, nullable=False),
    Column("revoked_at", Float),
    Column("revision", BigInteger, nullable=False, unique=True),
)
COUNTERS = Table(
    "key_counters",
    TABLES,
    Column("key_id", String, primary_key=True),
    Column("minute", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("minute_tokens", BigInteger, nullable=False),
    Column("day", BigInteger, nullable=False),
    Column("day_tokens", BigInteger, nullable=False),
)
"""Of the windows that limits count in: numbers of minutes and days since 1970."""
RUNNING = Table(
    "key_running",
    TABLES,
    Column("key_id", String, primary_key=True),
    Column("server", String, primary_key=True),
    Column("sequences", BigInteger, nullable=False),
    Column("until", Float, nullable=False),
)
USAGE = Table(
    "usage",
    TABLES,
    Column("day", String, primary_key=True),
    Column("key_id", String, primary_key=True),
    Column("base", String, primary_key=True),
    Column("adapter", String, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("aborted", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)
"""By day of UTC (``2026-11-29``), tenant, base model and adapter; the base alone has an empty adapter."""


class StoreUnavailable(Exception):
    """The database cannot be reached."""


class UnknownKey(LookupError):
    """No valid key has the given id."""


class UsageRow(NamedTuple):
    """A tenant's usage of an adapter on one day, with the columns of the table ``usage``."""

    day: str
    key_id: str
    base: str
    adapter: str
    requests: int
    aborted: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TenantStore:
    """Reads and writes keys, usage and the audit log. Thread-safe.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        now: returns the present Unix time in seconds.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, url: str, now: Callable[[], float] = time.time) -> None:
        self._now = now
        try:
            self._engine = open_engine(url, {"connect_timeout": _CONNECT_S})
            self.insert = insert_of(self._engine)
            create_tables(self._engine, AUDIT)
            create_tables(self._engine, TABLES)
        except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
            raise ConfigError(f"the database of keys cannot be opened: {error}") from error

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction, which is committed at the end of the block.

        Raises:
            StoreUnavailable: the database cannot be read or written.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StoreUnavailable(str(getattr(error, "orig", None) or error)) from error

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # --- keys ----------------------------------------------------------------------------------------

    def keys_since(self, revision: int) -> tuple[list[ApiKey], int]:
        """Return the keys that changed after a revision, and the latest revision."""
        query = select(_KEYS).where(_KEYS.c.revision > revision).order_by(_KEYS.c.revision)
        with self.transaction() as connection:
            rows = connection.execute(query).all()
        return [_key(row) for row in rows], rows[-1].revision if rows else revision

    def create(self, name: str, settings: KeySettings, actor: str) -> tuple[ApiKey, str]:
        """Create a key. Return it with its secret, which is not stored."""
        secret = new_secret()
        key = ApiKey(new_key_id(), name, digest_of(secret), settings, self._now())
        values = msgspec.structs.asdict(key) | {"settings": _encode(settings), "revision": _next_revision()}
        detail = {**({"name": name} if name else {}), "settings": _changes(KeySettings(), settings)}

        def write(connection: Connection) -> None:
            connection.execute(self.insert(_KEYS).values(values))
            note_change(connection, actor, "key created", key.key_id, detail, self._now)

        self._write(write)
        return key, secret

    def change(self, key_id: str, settings: KeySettings, actor: str) -> ApiKey:
        """Change the settings of a key.

        Raises:
            UnknownKey: the key does not exist, or is revoked.
        """
        return self._change(key_id, {"settings": _encode(settings)}, actor, "key changed", {}, settings)

    def rotate(self, key_id: str, overlap_s: float, actor: str) -> tuple[ApiKey, str]:
        """Give a key a new secret. The present secret stays valid for a time; older ones do not.

        Raises:
            UnknownKey: the key does not exist, or is revoked.
        """
        secret = new_secret()
        values = {"old_digest": _KEYS.c.digest, "digest": digest_of(secret), "old_until": self._now() + overlap_s}
        return self._change(key_id, values, actor, "key rotated", {"overlap_s": overlap_s}), secret

    def revoke(self, key_id: str, actor: str) -> ApiKey:
        """Revoke a key.

        Raises:
            UnknownKey: the key does not exist, or is already revoked.
        """
        return self._change(key_id, {"revoked_at": self._now()}, actor, "key revoked", {})

    def _change(
        self,
        key_id: str,
        values: dict[str, Any],
        actor: str,
        action: str,
        detail: dict[str, Any],
        settings: KeySettings | None = None,
    ) -> ApiKey:
        """Write to a key's row, and write the changed settings to the audit log."""
        found: list[ApiKey] = []
        statement = (
            update(_KEYS)
            .where(_KEYS.c.key_id == key_id, _KEYS.c.revoked_at.is_(None))
            .values(**values, revision=_next_revision())
            .returning(_KEYS)
        )
        before = select(_KEYS).where(_KEYS.c.key_id == key_id).with_for_update()

        def write(connection: Connection) -> None:
            old = None if settings is None else connection.execute(before).one_or_none()
            row = connection.execute(statement).one_or_none()
            if row is None:
                raise UnknownKey(key_id)
            found.append(_key(row))
            changes = {"settings": _changes(_key(old).settings, settings)} if old is not None and settings else {}
            note_change(connection, actor, action, key_id, detail | changes, self._now)

        self._write(write)
        return found[-1]

    def _write(self, write: Callable[[Connection], None]) -> None:
        """Write in a transaction, and retry while another server takes the same revision."""
        for left in reversed(range(_TRIES)):
            try:
                with self.transaction() as connection:
                    write(connection)
                return
            except IntegrityError:
                if not left:
                    raise

    # --- usage and audit -----------------------------------------------------------------------------

    def usage(self, first_day: str, last_day: str, key_id: str = "", adapter: str | None = None) -> list[UsageRow]:
        """Return the usage by day, tenant and adapter.

        Args:
            first_day, last_day: first and last day, in UTC.
            key_id: the only tenant to include; empty for all tenants.
            adapter: the only adapter to include; empty for only the base model; None for all.
        """
        query = (
            select(USAGE)
            .where(USAGE.c.day >= first_day, USAGE.c.day <= last_day)
            .order_by(USAGE.c.day, USAGE.c.key_id, USAGE.c.base, USAGE.c.adapter)
        )
        if key_id:
            query = query.where(USAGE.c.key_id == key_id)
        if adapter is not None:
            query = query.where(USAGE.c.adapter == adapter)
        with self.transaction() as connection:
            return [UsageRow(*row) for row in connection.execute(query)]

    def changes(self, subject: str, before: int, limit: int) -> list[AuditEntry]:
        """Return entries of the audit log; see ``read_changes``."""
        with self.transaction() as connection:
            return read_changes(connection, subject, before, limit)

    def forget_server(self, server: str) -> None:
        """Delete the running sequences of a server that stops."""
        with self.transaction() as connection:
            connection.execute(delete(RUNNING).where(RUNNING.c.server == server))


def _next_revision() -> Any:
    return select(func.coalesce(func.max(_KEYS.alias("last").c.revision), 0) + 1).scalar_subquery()


def _key(row: Any) -> ApiKey:
    settings = msgspec.json.decode(row.settings, type=KeySettings)
    return ApiKey(
        row.key_id, row.name, row.digest, settings, row.created_at, row.old_digest, row.old_until, row.revoked_at
    )


def _encode(settings: KeySettings) -> str:
    return msgspec.json.encode(settings).decode()


def _changes(before: KeySettings, after: KeySettings) -> dict[str, Any]:
    old = msgspec.to_builtins(before)
    return {name: value for name, value in msgspec.to_builtins(after).items() if value != old[name]}
