"""Keeps the keys of tenants in memory, together with their ledger."""

import threading
import time
from collections.abc import Callable

from lorikeet.tenants.keys import Access, ApiKey, KeySettings, digest_of
from lorikeet.tenants.ledger import Ledger
from lorikeet.tenants.store import TenantStore

_LEAST_REFRESH_S = 0.5
"""Between two looks into the database for a secret that is not known."""


class Tenants:
    """Holds the keys of tenants and the ledger that counts their requests. Thread-safe.

    ``find`` and ``by_id`` return without waiting. All other methods read the database and belong in a worker thread.

    Args:
        url: SQLAlchemy URL of the registry.
        base: name of the base model in the usage.
        now: returns the present Unix time in seconds.

    Attributes:
        store: the tables of the database.
        ledger: counts requests.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, url: str, base: str, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._keys: dict[str, ApiKey] = {}
        self._by_digest: dict[str, ApiKey] = {}
        self._revision = 0
        self._refreshed_s = -_LEAST_REFRESH_S
        self.store = TenantStore(url, now)
        self.refresh()
        self.ledger = Ledger(self.store, base, now, self.refresh)

    def find(self, secret: str) -> ApiKey | None:
        """Return the key of a secret; None if the key is unknown or not valid."""
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and digest in key.digests(self._now()) else None

    def by_id(self, key_id: str) -> ApiKey | None:
        """Return a key by its id, including revoked keys."""
        return self._keys.get(key_id)

    def list(self) -> "list[ApiKey]":
        """Return all keys, oldest first, including revoked keys."""
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.key_id))

    def access_of(self, tenant: str) -> Access | None:
        """Return the present rights of a tenant whose request has waited; None if its key is revoked."""
        key = self._keys.get(tenant)
        if key is None:
            return Access(actor=tenant)
        return None if key.revoked_at is not None else Access(key, tenant)

    def may_look_again(self) -> bool:
        """Return whether it is time to read the database for keys that other servers have made."""
        return time.monotonic() - self._refreshed_s > _LEAST_REFRESH_S

    def refresh(self) -> None:
        """Read changed keys from the database.

        Raises:
            StoreUnavailable: the database cannot be read.
        """
        self._refreshed_s = time.monotonic()
        with self._lock:
            keys, self._revision = self.store.keys_since(self._revision)
            for key in keys:
                old = self._keys.get(key.key_id)
                self._keys[key.key_id] = key
                for digest in () if old is None else (old.digest, old.old_digest):
                    self._by_digest.pop(digest, None)
                for digest in filter(None, (key.digest, key.old_digest)):
                    self._by_digest[digest] = key

    def create(self, name: str, settings: KeySettings, actor: str) -> tuple[ApiKey, str]:
        """Create a key. Return it with its secret."""
        made = self.store.create(name, settings, actor)
        self.refresh()
        return made

    def change(self, key_id: str, settings: KeySettings, actor: str) -> ApiKey:
        """Change the settings of a key. Raises UnknownKey."""
        changed = self.store.change(key_id, settings, actor)
        self.refresh()
        return changed

    def rotate(self, key_id: str, overlap_s: float, actor: str) -> tuple[ApiKey, str]:
        """Give a key a new secret. Raises UnknownKey."""
        rotated = self.store.rotate(key_id, overlap_s, actor)
        self.refresh()
        return rotated

    def revoke(self, key_id: str, actor: str) -> ApiKey:
        """Revoke a key. Raises UnknownKey."""
        revoked = self.store.revoke(key_id, actor)
        self.refresh()
        return revoked

    def close(self) -> None:
        """Write the last counts and close the database."""
        self.ledger.close()
        self.store.close()
