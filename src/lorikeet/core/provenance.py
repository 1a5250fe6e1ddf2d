"""Names the weights that made an answer: digests of the base and of the adapter version."""

import re
from typing import NamedTuple

DIGEST_HEADER = "X-Lorikeet-Digest"
"""Response header with the whole digests of an answer."""
EXPECTED = r"^[0-9a-fA-F]{8,64}(-[0-9a-fA-F]{8,64})?$"
"""Pattern of an expected digest: the beginning of one digest, or of the base's and the adapter's."""

_SHOWN = 12
_PARTS = re.compile(EXPECTED)


class Provenance(NamedTuple):
    """The weights that made an answer.

    Attributes:
        base: hex SHA-256 of the base: its files, dtype and quantisation.
        adapter: digest of the adapter version; empty for the base alone.
    """

    base: str
    adapter: str = ""

    @property
    def fingerprint(self) -> str:
        """The beginning of each digest, for answers: ``base`` or ``base-adapter``."""
        return "-".join(digest[:_SHOWN] for digest in self if digest)

    @property
    def digests(self) -> str:
        """The whole digests, in the same form."""
        return "-".join(digest for digest in self if digest)

    def matches(self, expected: str) -> bool:
        """Return whether an expected digest names these weights.

        Args:
            expected: the beginning of the adapter's digest (the base's, if the base alone answers), or
                ``base-adapter`` with the beginnings of both; it fits :data:`EXPECTED`.
        """
        assert _PARTS.match(expected)
        *base, last = expected.lower().split("-")
        own = (self.adapter or self.base).startswith(last)
        return own and (not base or (bool(self.adapter) and self.base.startswith(base[0])))
