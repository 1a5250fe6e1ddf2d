"""A transfer is done when every rank says so."""

import threading

from lorikeet.core.plan import TransferDone
from lorikeet.worker.transfer.finished import FinishedTransfers


def test_transfer_ends_with_its_last_rank_and_lasts_as_its_slowest() -> None:
    woken: list[None] = []
    finished = FinishedTransfers(2, lambda: woken.append(None))
    finished.report(TransferDone(1, duration_s=3.0))
    finished.report(TransferDone(2))
    assert (finished.take(), woken) == ([], [])
    finished.report(TransferDone(1, duration_s=1.0))
    assert len(woken) == 1
    assert finished.take() == [TransferDone(1, duration_s=3.0)]
    assert finished.take() == []


def test_one_rank_that_fails_fails_it() -> None:
    for errors in (("disk", None), (None, "disk"), ("disk", "other")):
        finished = FinishedTransfers(2, lambda: None)
        for error in errors:
            finished.report(TransferDone(7, error))
        assert finished.take() == [TransferDone(7, "disk")]


def test_waiting_ends_with_a_transfer_or_when_nothing_more_will_come() -> None:
    finished = FinishedTransfers(1, lambda: None)
    threading.Thread(target=finished.report, args=(TransferDone(1),)).start()
    finished.wait(None)
    assert finished.take() == [TransferDone(1)]
    threading.Thread(target=finished.break_off).start()
    finished.wait(None)
    assert finished.take() == []
