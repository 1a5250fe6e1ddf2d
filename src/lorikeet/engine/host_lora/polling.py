"""Waiting for words in shared memory: at first without rest, then with short naps."""

import select
import time

LOOKS = 10
"""Looks between two rests."""
NAP_S = 20e-6
_SPIN_S = 200e-6


class Rests:
    """The rests of one wait, which begins now."""

    def __init__(self) -> None:
        self._naps_at_s = time.monotonic() + _SPIN_S

    def rest(self) -> None:
        """Let other threads run, those that copy above all; and sleep a little once the wait has become long.

        A sleep of no time takes as long as a nap does since Python 3.11 (python/cpython issue 125997), a select of
        nothing a microsecond.
        """
        nap(0 if time.monotonic() < self._naps_at_s else NAP_S)


def nap(seconds: float = NAP_S) -> None:
    """Sleep for a time that is far below a millisecond."""
    select.select((), (), (), seconds)
