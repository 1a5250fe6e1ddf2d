"""Defines the keys of tenants: scopes, limits and priorities."""

import fnmatch
import hashlib
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec

from lorikeet.config import Count

SECRET_PREFIX = "sk-lorikeet-"
_SECRET_BYTES = 32
_ID_BYTES = 8

_Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Patterns = Annotated[tuple[_Pattern, ...], msgspec.Meta(max_length=100)]


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rights and limits of a key.

    Patterns are globs over names of adapters and of the base; ``*`` also matches a slash.

    Attributes:
        use: models that the key's requests may name.
        see: further models that the key's tenant may see in lists.
        load: names under which the tenant may register adapters, and folders from which it may load them.
        requests_per_minute: most sequences in a minute of the clock. In this and all following limits, 0 means no
            limit.
        tokens_per_minute: most tokens of prompts and answers in a minute of the clock.
        tokens_per_day: most tokens of prompts and answers in a day of UTC.
        concurrent_requests: most unfinished sequences.
        max_adapters: most adapters that the tenant may own.
        max_adapter_bytes: most bytes of the weights of these adapters.
        priority: priority of the key's requests, for presets that use priorities: lower runs earlier.
        weight: weight of the tenant's share, for presets that share fairly between tenants.
        cache_group: group of keys that reuse each other's KV; empty for no group.
    """

    use: _Patterns = ("*",)
    see: _Patterns = ()
    load: _Patterns = ()
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    tokens_per_day: Count = 0
    concurrent_requests: Count = 0
    max_adapters: Count = 0
    max_adapter_bytes: Count = 0
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    cache_group: Annotated[str, msgspec.Meta(max_length=100)] = ""

    @property
    def is_limited(self) -> bool:
        """Whether the key has limits, so that its requests are counted before they run."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.concurrent_requests)
        return any(limits)


class ApiKey(msgspec.Struct, frozen=True, dict=True):
    """A key without its secret.

    Attributes:
        key_id: permanent id of the key, which is also the name of its tenant.
        name: a name for people.
        digest: SHA-256 of the secret, in hex.
        settings: rights and limits.
        created_at: unix time of creation, in seconds.
        old_digest: digest of the secret before the last rotation; empty without one.
        old_until: unix time until which the old secret is valid, in seconds.
        revoked_at: unix time of revocation, in seconds; None for a valid key.
    """

    key_id: str
    name: str
    digest: str
    settings: KeySettings
    created_at: float
    old_digest: str = ""
    old_until: float = 0.0
    revoked_at: float | None = None

    def digests(self, now: float) -> tuple[str, ...]:
        """Return the digests of the secrets that are valid at a Unix time."""
        if self.revoked_at is not None:
            return ()
        return (self.digest, self.old_digest) if self.old_digest and now < self.old_until else (self.digest,)

    @cached_property
    def _use(self) -> re.Pattern[str]:
        return _compiled(self.settings.use)

    @cached_property
    def _load(self) -> re.Pattern[str]:
        return _compiled(self.settings.load)

    @cached_property
    def _see(self) -> re.Pattern[str]:
        return _compiled((*self.settings.see, *self.settings.use, *self.settings.load))


def _compiled(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


class Access(NamedTuple):
    """The rights of a request's sender.

    Attributes:
        key: the tenant's key; None for the operator, who may do everything.
        actor: name of the sender for the audit log.
    """

    key: ApiKey | None = None
    actor: str = ""

    def may_see(self, name: str) -> bool:
        """Return whether the sender may see a model of this name."""
        return self.key is None or self.key._see.match(name) is not None

    def may_use(self, name: str) -> bool:
        """Return whether the sender may use a model."""
        return self.key is None or self.key._use.match(name) is not None

    def may_load(self, name: str) -> bool:
        """Return whether the sender may register an adapter of this name, or from the folder of this name."""
        return self.key is None or self.key._load.match(name) is not None

    def owns(self, owner: str) -> bool:
        """Return whether the sender may change an adapter of an owner, given as the id of a key."""
        return self.key is None or self.key.key_id == owner

    def priority(self, asked: int) -> int:
        """Return the priority of a request. A tenant may make it less urgent than its key, but not more."""
        return asked if self.key is None else self.key.settings.priority + max(0, asked)

    @property
    def weight(self) -> float:
        """The weight of the tenant's share."""
        return 1.0 if self.key is None else self.key.settings.weight


OPERATOR = Access()
"""May do everything."""


def new_secret() -> str:
    """Return a secret of 256 random bits."""
    return SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def new_key_id() -> str:
    """Return the id of a new key."""
    return f"tenant-{secrets.token_hex(_ID_BYTES)}"


def digest_of(secret: str) -> str:
    """Return the stored hash of a secret. Secrets are random, so a plain hash cannot be reversed by guessing."""
    return hashlib.sha256(secret.encode()).hexdigest()
