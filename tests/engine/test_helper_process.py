"""Helper processes that do not do what they should."""

import signal
import threading

import msgspec
import pytest

from lorikeet.engine import helper_process
from lorikeet.engine.helper_process import start_helper_process


class Much(msgspec.Struct):
    """More than the system holds for a process that takes nothing in."""

    content: bytes = bytes(2**22)


def test_a_process_that_takes_nothing_in_is_ended_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "SEND_S", 0.05)
    helper = start_helper_process("lorikeet.engine.loader_process", "the loader process")
    try:
        helper.process.send_signal(signal.SIGSTOP)
        sender = threading.Thread(target=helper.send, args=(Much(),), daemon=True)
        sender.start()
        sender.join(60.0)
        assert not sender.is_alive()
        assert helper.process.wait() == -signal.SIGKILL
    finally:
        helper.end()


def test_what_is_sent_to_a_process_that_has_ended_is_lost_without_a_word() -> None:
    helper = start_helper_process("lorikeet.engine.loader_process", "the loader process")
    helper.end()
    helper.send(Much())
    assert helper.receive() is None
    helper.hang_up()
    helper.send(Much())
    assert helper.is_gone.is_set()
    assert not helper.can_work
