"""A gate before copies to the device: tests say what arrives, and when."""

import threading
from typing import Any

from lorikeet.core.plan import Tier
from lorikeet.worker.transfer.copies import CopyGroup
from lorikeet.worker.transfer.state import TransferState
from lorikeet.worker.transfer.transfers import TransferManager


class Gate:
    """Lets groups of blocks pass one by one, and none unless told to.

    Args:
        transfers: whose copies to the device wait here from now on.
    """

    def __init__(self, transfers: TransferManager) -> None:
        self._copier: Any = transfers._copiers[Tier.DEVICE]
        self._next = self._copier._take
        self._changed = threading.Condition()
        self._passes = 0
        self._passing: CopyGroup[TransferState] | None = None
        self.failing = False
        self._copier._take = self._take
        done = self._copier._on_done

        def on_done(group: CopyGroup[TransferState], error: str | None) -> None:
            done(group, "the gate says so" if self.failing else error)
            with self._changed:
                self._passing = None
                self._changed.notify_all()

        self._copier._on_done = on_done

    def open(self, groups: int) -> None:
        """Let so many more pass."""
        with self._changed:
            self._passes += groups
        self._copier.wake()

    def shut(self) -> None:
        """Let no more pass."""
        with self._changed:
            self._passes = 0

    def wait_until_shut(self) -> None:
        """Block until as many have passed, and have been copied, as were let."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._passes == 0 and self._passing is None, 60.0)

    def _take(self) -> CopyGroup[TransferState] | None:
        with self._changed:
            if self._passes == 0:
                return None
            group: CopyGroup[TransferState] | None = self._next()
            if group is not None:
                self._passes -= 1
                self._passing = group
            return group
