"""Chooses one of several versions by shares, the same in every server and router.

Each version draws a number from the hash of the split's name, its own name and the key; the version with the smallest
``-log(number) / share`` is chosen (weighted rendezvous hashing). So a share that changes, or a version that is removed,
moves only the keys that it must.
"""

import math
from collections.abc import Mapping
from hashlib import blake2b

import msgspec


class Split(msgspec.Struct, frozen=True):
    """A name whose requests are split between adapters.

    Attributes:
        versions: names of adapters, with their shares of the requests; the shares need not add up to 1.
        shadow: names of adapters that get copies of requests, with the share of the requests that are copied. Answers
            to copies are dropped.
    """

    versions: dict[str, float]
    shadow: dict[str, float] = {}

    def ranked(self, name: str, key: str) -> list[str]:
        """Return the versions in the order in which a request tries them; all but the first are for removed ones.

        Args:
            name: the split's name.
            key: a user, a session or a request. Requests with one key get one version.
        """
        return sorted(
            (version for version, share in self.versions.items() if share > 0),
            key=lambda version: -math.log(_number(name, version, key)) / self.versions[version],
        )

    def copied_to(self, name: str, request_id: str) -> list[str]:
        """Return the adapters that get a copy of a request."""
        return [each for each, share in self.shadow.items() if _number(name, f"shadow {each}", request_id) < share]


def why_invalid(name: str, versions: Mapping[str, float], shadow: Mapping[str, float]) -> str:
    """Return why the shares of a split are not valid; empty if they are."""
    if not versions or not any(share > 0 for share in versions.values()):
        return "versions: at least one version must have a share above 0."
    for field, shares in (("versions", versions), ("shadow", shadow)):
        for each, share in shares.items():
            if each == name:
                return f"{field}: {name!r} cannot be a version of itself."
            if not math.isfinite(share) or share < 0 or (field == "shadow" and share > 1):
                most = " to 1" if field == "shadow" else ""
                return f"{field}: the share of {each!r} must be a number from 0{most}, not {share}."
    return ""


def _number(name: str, version: str, key: str) -> float:
    """Return a number above 0 and below 1 that depends on all three texts."""
    digest = blake2b("\0".join((name, version, key)).encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
