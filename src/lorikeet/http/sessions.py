"""Sessions of SageMaker: ids by which its front sends the requests of one client to the same instance.

Nothing but the id is kept here. What a session saves is the KV of earlier requests, which is found by their tokens.
"""

import secrets
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta

from lorikeet.http.errors import ApiError, bad_request

LASTS_S = 1200.0
"""After the latest request."""
_MOST = 10_000


class Sessions:
    """The sessions that have begun and not ended, by tenant and id. The one unused for longest goes first."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def begin(self, tenant: str) -> tuple[str, datetime]:
        """Return the id of a new session, and when it ends if it is not used."""
        session = secrets.token_hex(16)
        self._until_s[tenant, session] = time.monotonic() + LASTS_S
        while len(self._until_s) > _MOST:
            self._until_s.popitem(last=False)
        return session, datetime.now(UTC) + timedelta(seconds=LASTS_S)

    def use(self, tenant: str, session: str | None) -> None:
        """Let a session last longer.

        Raises:
            ApiError: 424, none is named; 400, there is no such session.
        """
        if not session:
            raise ApiError(424, "invalid session_id: X-Amzn-SageMaker-Session-Id names no session.")
        if self._until_s.get((tenant, session), 0.0) <= time.monotonic():
            raise bad_request(f"session not found: {session[:100]!r}")
        self._until_s[tenant, session] = time.monotonic() + LASTS_S
        self._until_s.move_to_end((tenant, session))

    def end(self, tenant: str, session: str | None) -> None:
        """End a session; raises as :meth:`use`."""
        self.use(tenant, session)
        del self._until_s[tenant, session or ""]
