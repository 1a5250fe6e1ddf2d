"""Identifies the weights that produced an answer by digests of the base and of the adapter version."""

import re
from typing import NamedTuple

DIGEST_HEADER = "X-Lorikeet-Digest"
"""Response header with the whole digests of an answer."""
EXPECTED = r"^[0-9a-fA-F]{8,64}(-[0-9a-fA-F]{8,64})?$"
"""Pattern of an expected digest: the first characters of one digest, or of the base's and the adapter's."""

_SHOWN = 12
_PARTS = re.compile(EXPECTED)
EXPECTED_IN_WORDS = (
    "must be the first 8 to 64 hexadecimal digits of a digest, such as 3c9ffbe396ef, or the base's and the adapter's "
    "joined by a hyphen, such as 431d70ca9c51-3c9ffbe396ef"
)


def is_expected_digest(text: str) -> bool:
    """Return whether a text has the form of an expected digest."""
    return _PARTS.fullmatch(text) is not None


class Provenance(NamedTuple):
    """The weights that produced an answer.

    Attributes:
        base: hex SHA-256 of the base's files, dtype and quantisation.
        adapter: digest of the adapter version; empty without an adapter.
    """

    base: str
    adapter: str = ""

    @property
    def fingerprint(self) -> str:
        """The first characters of each digest, for answers: ``base`` or ``base-adapter``."""
        return "-".join(digest[:_SHOWN] for digest in self if digest)

    @property
    def digests(self) -> str:
        """The whole digests in the form ``base`` or ``base-adapter``."""
        return "-".join(digest for digest in self if digest)

    def matches(self, expected: str) -> bool:
        """Return whether an expected digest matches these weights.

        Args:
            expected: the first characters of the adapter's digest (or of the base's, without an adapter), or
                ``base-adapter`` with the first characters of both. It must match :data:`EXPECTED`.
        """
        assert _PARTS.match(expected)
        *base, last = expected.lower().split("-")
        own = (self.adapter or self.base).startswith(last)
        return own and (not base or (bool(self.adapter) and self.base.startswith(base[0])))
