"""Helper processes that die, hang or do not read."""

import signal
import threading
from typing import Any

import msgspec
import pytest

from lorikeet.worker import helper_process
from lorikeet.worker.helper_process import Helper, HelperProcess, start_helper_process


class Much(msgspec.Struct):
    """More than the system holds for a process that takes nothing in."""

    content: bytes = bytes(2**22)


def test_process_that_reads_nothing_is_ended_and_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "SEND_TIMEOUT_S", 0.05)
    helper = start_helper_process("lorikeet.worker.transfer.loader_process", "the loader process")
    try:
        helper.process.send_signal(signal.SIGSTOP)
        sender = threading.Thread(target=helper.send, args=(Much(),), daemon=True)
        sender.start()
        sender.join(60.0)
        assert not sender.is_alive()
        assert helper.process.wait() == -signal.SIGKILL
    finally:
        helper.end()


class Chatty:
    """A process on a clock of its own, by which it says a word every ten seconds, and each word is heard at once.

    Attributes:
        now_s: the time.
        ended: it was.
    """

    def __init__(self, ready_s: float) -> None:
        self.now_s = self.ready_s = ready_s
        self._spoke_s = ready_s

    def monotonic(self) -> float:
        return self.now_s

    def is_silent(self, for_s: float) -> bool:
        self.now_s = min(self.now_s + for_s, self._spoke_s + 10.0)
        return self.now_s < self._spoke_s + 10.0

    def receive(self) -> bytes:
        self._spoke_s = self.now_s
        return b"a word"


class Creditor(Helper):
    """Is owed something since a time."""

    def __init__(self, owed_since_s: float) -> None:
        self._name = "the loader process"
        self._owed_since_s = owed_since_s

    def _is_reply_overdue(self, process: HelperProcess, since_s: float) -> bool:
        return self._owed_since_s <= since_s


@pytest.mark.parametrize(("owed_since_s", "ended_s"), [(1007.0, 1067.0), (100.0, 1060.0), (2000.0, None)])
def test_a_process_with_an_overdue_reply_is_killed_despite_other_messages(
    monkeypatch: pytest.MonkeyPatch, owed_since_s: float, ended_s: float | None
) -> None:
    """Nor does it owe what it was asked for before it was up before it has had the time."""
    process: Any = Chatty(1000.0)
    monkeypatch.setattr(helper_process, "time", process)
    creditor = Creditor(owed_since_s)
    while creditor._next(process) is not None and process.now_s < 1500.0:
        pass
    assert process.now_s == (ended_s or 1500.0)


def test_messages_to_a_dead_process_are_dropped_silently() -> None:
    helper = start_helper_process("lorikeet.worker.transfer.loader_process", "the loader process")
    helper.end()
    helper.send(Much())
    assert helper.receive() is None
    helper.disconnect()
    helper.send(Much())
    assert helper.has_ended.is_set()
    assert not helper.is_ready
