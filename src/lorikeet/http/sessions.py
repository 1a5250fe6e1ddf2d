"""Names the sessions of trainers, and keeps those of SageMaker.

A session is only an id. SageMaker's front, and a router, send its requests to the same instance. That saves time by the
KV of its earlier requests, which is found by their tokens.
"""

import secrets
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta

from lorikeet.http.errors import ApiError, bad_request

SESSION_HEADER = "X-Session-ID"
"""Header of trainers such as SkyRL: the requests of one trajectory go to the replica that has its KV."""
_MAX_HEADER = 256

LASTS_S = 1200.0
"""Life of a session after its latest request."""
_MOST = 10_000


def session_of(header: str | None, tenant: str) -> str:
    """Return the name of a request's session, which no other tenant shares; empty without the header."""
    return f"{tenant}\0{header[:_MAX_HEADER]}" if header else ""


class Sessions:
    """Keeps the open sessions by tenant and id. The session unused for longest is dropped first."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def begin(self, tenant: str) -> tuple[str, datetime]:
        """Begin a session. Return its id, and the time at which it ends without use."""
        session = secrets.token_hex(16)
        self._until_s[tenant, session] = time.monotonic() + LASTS_S
        while len(self._until_s) > _MOST:
            self._until_s.popitem(last=False)
        return session, datetime.now(UTC) + timedelta(seconds=LASTS_S)

    def use(self, tenant: str, session: str | None) -> None:
        """Extend a session.

        Raises:
            ApiError: 424, the request names no session; 400, the session does not exist.
        """
        if not session:
            raise ApiError(424, "invalid session_id: X-Amzn-SageMaker-Session-Id names no session.")
        if self._until_s.get((tenant, session), 0.0) <= time.monotonic():
            raise bad_request(f"session not found: {session[:100]!r}")
        self._until_s[tenant, session] = time.monotonic() + LASTS_S
        self._until_s.move_to_end((tenant, session))

    def end(self, tenant: str, session: str | None) -> None:
        """End a session; see :meth:`use` for errors."""
        self.use(tenant, session)
        del self._until_s[tenant, session or ""]
