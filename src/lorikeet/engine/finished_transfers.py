"""Transfers that have ended, on their way from the threads that notice to the loop."""

import threading
from collections.abc import Callable

from lorikeet.core.plan import TransferDone


class FinishedTransfers:
    """Transfers that every rank has finished, handed from the threads that notice to the loop.

    Args:
        ranks: how many have to report a transfer before it counts as done.
        on_done: called, on the reporting thread, when there is something new.
    """

    def __init__(self, ranks: int, on_done: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_done = on_done
        self._changed = threading.Condition()
        self._reports: dict[int, list[TransferDone]] = {}
        self._done: list[TransferDone] = []
        self._broken = False

    def report(self, done: TransferDone) -> None:
        """Count one rank's report; the first error among them is the transfer's, and the longest time."""
        with self._changed:
            reports = self._reports.setdefault(done.transfer_id, [])
            reports.append(done)
            if len(reports) < self._ranks:
                return
            del self._reports[done.transfer_id]
            error = next((report.error for report in reports if report.error is not None), None)
            duration_s = max(report.duration_s for report in reports)
            self._done.append(TransferDone(done.transfer_id, error, duration_s))
            self._changed.notify_all()
        self._on_done()

    def break_off(self) -> None:
        """Nothing more will come: wake whoever waits."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._on_done()

    def take(self) -> list[TransferDone]:
        """Return what was done since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self, timeout_s: float | None) -> None:
        """Block until there is something to take, or nothing more will come, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) or self._broken, timeout_s)
