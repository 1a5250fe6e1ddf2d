"""The lease of a replica, which names the one server that may drive it."""

from collections.abc import Callable
from typing import NamedTuple

TERM_S = 5.0
"""Seconds without a renewal after which another server may claim a replica."""

RENEW_EVERY_S = 1.0
"""Seconds between two renewals."""

WISH_S = 5.0
"""Seconds for which the wish of a server for a replica counts, unless the server repeats it."""

FIRST_FENCE = 1
"""Fencing token of a replica's first owner."""


class FencedOff(RuntimeError):
    """The caller no longer owns the replica, because another server has claimed it."""


class LeaseState(NamedTuple):
    """Describes a lease for a server that may claim it.

    Attributes:
        owner: id of the process that owns or owned it last.
        server: name of that server, for the log.
        is_free: whether the lease has run out or was released.
        is_spare: whether its owner has it beside its own number of replicas.
        silent_s: seconds since the last renewal.
    """

    owner: str
    server: str
    is_free: bool
    is_spare: bool
    silent_s: float


class Renewal(NamedTuple):
    """Answers a renewal.

    Attributes:
        is_owner: whether the caller still owns the replica.
        is_wanted: whether a server that starts asks for the replica.
    """

    is_owner: bool
    is_wanted: bool


class ReplicaLease:
    """Grants a replica to one server at a time. Each claim raises the fencing token, so older tokens do not act.

    Args:
        owner: id of the first owner's process.
        server: name of the first owner.
        clock: returns seconds.
        is_spare: whether the first owner has the replica beside its own number of replicas.

    Attributes:
        fence: fencing token of the owner.
    """

    def __init__(self, owner: str, server: str, clock: Callable[[], float], *, is_spare: bool = False) -> None:
        self.fence = FIRST_FENCE
        self._owner = owner
        self._server = server
        self._clock = clock
        self._renewed_s = clock()
        self._is_released = False
        self._is_spare = is_spare
        self._wanted_by = ""
        self._wanted_s = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last renewal, claim or release."""
        return self._clock() - self._renewed_s

    @property
    def is_free(self) -> bool:
        """Whether no server owns the replica."""
        return self._is_released or self.silent_s > TERM_S

    def state(self) -> LeaseState:
        """Return a description of the lease."""
        return LeaseState(self._owner, self._server, self.is_free, self._is_spare, self.silent_s)

    def check(self, fence: int) -> None:
        """Let only the owner act.

        Raises:
            FencedOff: another server has claimed the replica, or it was released.
        """
        if fence != self.fence or self._is_released:
            raise FencedOff(f"{self._server} owns this replica now")

    def renew(self, fence: int) -> Renewal:
        """Prolong the lease of the owner. A lease that has run out goes on, unless another server has claimed it."""
        is_owner = fence == self.fence and not self._is_released
        if is_owner:
            self._renewed_s = self._clock()
        return Renewal(is_owner, is_owner and bool(self._wish))

    def claim(self, owner: str, server: str, *, is_spare: bool) -> int | None:
        """Make a process the owner and return its fencing token; None unless the lease is free.

        A replica that was handed back is free for the server that asked for it.
        """
        if not self.is_free or (self._is_released and self._wish not in ("", owner)):
            return None
        self.fence += 1
        self._owner = owner
        self._server = server
        self._renewed_s = self._clock()
        self._is_released = False
        self._is_spare = is_spare
        self._wanted_by = ""
        return self.fence

    def want(self, owner: str) -> bool:
        """Ask the owner to hand a spare replica back. Return False if it is not spare, or another server asks too."""
        if not self._is_spare or owner == self._owner or self._wish not in ("", owner):
            return False
        self._wanted_by = owner
        self._wanted_s = self._clock()
        return True

    def release(self, fence: int) -> None:
        """Free the replica at once; its engine goes on.

        Raises:
            FencedOff: another server has claimed the replica.
        """
        self.check(fence)
        self._is_released = True
        self._renewed_s = self._clock()

    @property
    def _wish(self) -> str:
        """Id of the process that asks for the replica; empty for none."""
        return self._wanted_by if self._clock() - self._wanted_s <= WISH_S else ""
