"""Records changes of adapters and keys, with the changes' authors, in the registry's database."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Column, Float, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.engine import Connection

AUDIT = MetaData()
_AUDIT = Table(
    "audit",
    AUDIT,
    # SQLite numbers rows automatically only in a column of exactly this type.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("unix_s", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("action", String, nullable=False),
    Column("subject", String, nullable=False, index=True),
    Column("detail", String, nullable=False),
)


class AuditEntry(NamedTuple):
    """One change of an adapter or key.

    Attributes:
        number: number of the change; later changes have larger numbers.
        unix_s: Unix time of the change in seconds.
        actor: id of a tenant, or name of an operator's key. Empty if the server has no keys.
        action: the kind of change, such as ``adapter added`` or ``key revoked``.
        subject: the adapter's name, or the key's id.
        detail: further text about the change.
    """

    number: int
    unix_s: float
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]


def note_change(
    connection: Connection,
    actor: str,
    action: str,
    subject: str,
    detail: dict[str, Any],
    now: Callable[[], float] = time.time,
) -> None:
    """Add an entry in the transaction of the change."""
    text = msgspec.json.encode(detail).decode()
    connection.execute(insert(_AUDIT).values(unix_s=now(), actor=actor, action=action, subject=subject, detail=text))


def newest_change(connection: Connection) -> int:
    """Return the largest number of an entry; 0 if there is none."""
    return int(connection.scalar(select(func.max(_AUDIT.c.number))) or 0)


def changed_subjects(connection: Connection, after: int) -> dict[int, str]:
    """Return the subjects of all entries with numbers above ``after``, by number."""
    query = select(_AUDIT.c.number, _AUDIT.c.subject).where(_AUDIT.c.number > after)
    return dict(connection.execute(query).all())


def read_changes(connection: Connection, subject: str, before: int, limit: int) -> list[AuditEntry]:
    """Return entries, the latest first.

    Args:
        connection: connection to the registry's database.
        subject: adapter or key whose entries to return; empty for all.
        before: only entries with smaller numbers are returned; 0 for all.
        limit: maximum number of entries.
    """
    query = select(_AUDIT).order_by(_AUDIT.c.number.desc()).limit(limit)
    if subject:
        query = query.where(_AUDIT.c.subject == subject)
    if before:
        query = query.where(_AUDIT.c.number < before)
    return [
        AuditEntry(number, unix_s, actor, action, of, msgspec.json.decode(detail))
        for number, unix_s, actor, action, of, detail in connection.execute(query)
    ]
