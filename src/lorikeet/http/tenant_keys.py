"""Keys and usage of tenants as the routes of a server and of a router show them."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.threads import in_daemon_thread
from lorikeet.tenants.keys import Access, ApiKey, KeySettings
from lorikeet.tenants.store import StoreUnavailable, UnknownKey
from lorikeet.tenants.tenants import Tenants

MOST_CHANGES = 1000
"""Entries of the audit log that one call lists."""
LONGEST_OVERLAP_S = 30 * 86400
"""Most seconds for which the secret before a rotation stays valid."""
DEFAULT_OVERLAP_S = 3600.0
"""Seconds for which it stays valid by default."""
LONGEST_NAME = 100
"""Most characters of a key's name."""
_USAGE_DAYS = 31

_T = TypeVar("_T")


def key_card(key: ApiKey) -> dict[str, Any]:
    """Return a key without its secret, as JSON."""
    return {
        "id": key.key_id,
        "object": "key",
        "name": key.name,
        "created": int(key.created_at),
        "revoked": None if key.revoked_at is None else int(key.revoked_at),
        "settings": msgspec.to_builtins(key.settings),
    }


def known_key(tenants: Tenants, key_id: str) -> ApiKey:
    """Return a key by its id.

    Raises:
        ApiError: 404, the key does not exist.
    """
    key = tenants.by_id(key_id)
    if key is None:
        raise _unknown(key_id)
    return key


def changed_settings(given: dict[str, Any], present: KeySettings) -> KeySettings:
    """Return settings with some fields changed; null stands for the default.

    Raises:
        ApiError: 400, a field is unknown or its value is wrong.
    """
    fields = msgspec.to_builtins(present) | given
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, KeySettings)
    except msgspec.ValidationError as error:
        raise bad_request(f"settings: {error}.", "settings") from error


async def usage_page(
    tenants: Tenants, access: Access, start: date | None, end: date | None, key: str, adapter: str | None
) -> bytes:
    """Return usage by day in UTC, key and model as JSON; a tenant sees its own, the operator sees all.

    Args:
        tenants: the keys, with their usage.
        access: the sender's rights.
        start, end: the first and the last day; None for the last 31 days.
        key: the only key to include; empty for all.
        adapter: the only adapter to include; empty for only the base model; None for all.

    Raises:
        ApiError: 400, the first day is after the last; 503, the database cannot be reached.
    """
    last = end or datetime.now(UTC).date()
    first = start or last - timedelta(days=_USAGE_DAYS - 1)
    if first > last:
        raise bad_request(f"start is {first}, which is after the end, {last}.", "start")
    if access.key is not None:
        key = access.key.key_id

    def read() -> bytes:
        tenants.ledger.flush().result()
        rows = tenants.store.usage(str(first), str(last), key, adapter)
        return msgspec.json.encode({"object": "list", "data": [_usage_row(tenants, row._asdict()) for row in rows]})

    return await queried(read)


def _usage_row(tenants: Tenants, row: dict[str, Any]) -> dict[str, Any]:
    key_id = row.pop("key_id")
    adapter = row.pop("adapter")
    key = tenants.by_id(key_id)
    return {
        "day": row.pop("day"),
        "key": key_id,
        "key_name": "" if key is None else key.name,
        "base": row.pop("base"),
        "adapter": adapter or None,
        **row,
    }


def _unknown(key_id: str) -> ApiError:
    return ApiError(404, f"The key {key_id[:100]!r} does not exist, or is revoked.", param="key_id")


async def queried(work: Callable[[], _T]) -> _T:
    """Run work on the database in a thread.

    Raises:
        ApiError: 404 for an unknown key, 503 if the database cannot be reached.
    """
    try:
        return await in_daemon_thread(work)
    except UnknownKey as error:
        raise _unknown(str(error)) from error
    except StoreUnavailable as error:
        raise ApiError(503, "The database of keys cannot be reached now.", headers={"Retry-After": "5"}) from error
