"""Copiers copy a few blocks at a time, over a link of limited speed."""

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lorikeet.core.process_tuning import NICE
from lorikeet.worker.transfer.copies import Copier, CopyGroup
from lorikeet.worker.transfer.device import BlockCopy, Cpu, DeviceBackend
from lorikeet.worker.transfer.finished import TransferCounts, TransferThread, TransferWork
from tests.support.late_device import LateDevice

BLOCK = torch.arange(128, dtype=torch.float32)


class Queue:
    """Groups to be copied, and what became of them."""

    def __init__(self, *groups: CopyGroup[str]) -> None:
        self.groups = deque(groups)
        self.turns: list[str] = []
        self.done: list[tuple[str, str | None]] = []
        self.is_asked = False
        self.changed = threading.Condition()

    def take(self) -> CopyGroup[str] | None:
        with self.changed:
            self.is_asked = True
            self.changed.notify_all()
            return self.groups.popleft() if self.groups else None

    def turn(self, group: CopyGroup[str]) -> None:
        self.turns.append(group.job)

    def wait_until_left(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.is_asked and len(self.groups) == count, 60.0)

    def note(self, group: CopyGroup[str], error: str | None) -> None:
        with self.changed:
            self.done.append((group.job, error))
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) == count, 60.0)


def group(name: str, targets: Tensor, device: DeviceBackend | None = None) -> CopyGroup[str]:
    """Copies of ``BLOCK``, each with another number added."""
    sources = torch.stack([BLOCK + i for i in range(len(targets))])
    made = device or Cpu()
    made.register(sources)
    blocks = range(len(sources))
    return CopyGroup(name, made.steps.record_event(), BlockCopy(sources, blocks, targets, blocks))


@contextmanager
def copying(
    queue: Queue, link_bytes_per_s: float = 0.0, device: DeviceBackend | None = None
) -> Iterator[tuple[Copier[str], TransferCounts]]:
    """A copier at work."""
    counts = TransferCounts()
    made = device or Cpu()
    copier = Copier(
        "copier", made.stream(), made.copies_ahead, queue.take, queue.turn, queue.note, link_bytes_per_s, counts
    )
    try:
        yield copier, counts
    finally:
        copier.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_steps_come_before_copies() -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    seen = list[int]()

    class Watched(Queue):
        def turn(self, group: CopyGroup[str]) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    queue = Watched(group("0", torch.zeros(1, 128)))
    with copying(queue):
        queue.wait_for(1)
    assert seen == [here + NICE]
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_groups_are_copied_in_order_and_their_blocks_counted() -> None:
    targets = torch.zeros(3, 2, 128)
    queue = Queue(group("0", targets[0]), group("1", targets[1]))
    with copying(queue) as (copier, counts):
        queue.wait_for(2)
        queue.groups.append(group("2", targets[2]))
        copier.wake()
        queue.wait_for(3)
        ((worker, times),) = counts.by_thread().items()
    assert queue.done == [("0", None), ("1", None), ("2", None)]
    assert torch.equal(targets, torch.stack([BLOCK, BLOCK + 1]).expand(3, 2, 128))
    assert (worker.work, times) == (TransferWork.COPY, 6)
    assert worker != TransferThread(TransferWork.COPY, threading.get_native_id())


def test_a_failed_copy_reports_the_reason_and_others_continue() -> None:
    target = torch.zeros(1, 128)
    queue = Queue(
        CopyGroup("wrong", Cpu().record_event(), BlockCopy(BLOCK[None, :100], [0], target, [0])), group("right", target)
    )
    with copying(queue):
        queue.wait_for(2)
    (wrong, error), right = queue.done
    assert wrong == "wrong"
    assert re.search("100.*128|128.*100", error or "")
    assert right == ("right", None)
    assert torch.equal(target[0], BLOCK)


def test_blocks_take_the_time_that_the_link_needs() -> None:
    rate = BLOCK.nbytes * 1000.0
    queue = Queue(*(group("", torch.zeros(4, 128)) for _ in range(5)))
    started_s = time.monotonic()
    with copying(queue, rate):
        queue.wait_for(5)
        assert time.monotonic() - started_s >= 20 * BLOCK.nbytes / rate


@pytest.mark.parametrize("is_linked", [False, True])
def test_copying_gives_way_until_the_links_time_is_over(is_linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    untils_s: list[float] = []
    copy_blocks = Cpu.copy_blocks

    def noted(device: Cpu, copy: BlockCopy, until_s: float) -> None:
        untils_s.append(until_s)
        copy_blocks(device, copy, until_s)

    monkeypatch.setattr(Cpu, "copy_blocks", noted)
    group_s = 4 * BLOCK.nbytes / (rate := BLOCK.nbytes * 1000.0)
    queue = Queue(*(group("", torch.zeros(4, 128)) for _ in range(3)))
    began_s = time.monotonic()
    with copying(queue, rate if is_linked else 0.0):
        queue.wait_for(3)
    first_s = untils_s[0]
    assert untils_s == (
        [pytest.approx(first_s + i * group_s, rel=0, abs=1e-6) for i in range(3)] if is_linked else [0.0] * 3
    )
    assert not is_linked or began_s + group_s <= first_s <= time.monotonic()


def test_the_turn_of_a_group_begins_before_it_is_copied() -> None:
    target = torch.zeros(1, 128)
    seen: list[float] = []

    class Looking(Queue):
        def turn(self, group: CopyGroup[str]) -> None:
            seen.append(float(target.sum()))

    queue = Looking(group("", target))
    with copying(queue):
        queue.wait_for(1)
    assert seen == [0.0]
    assert torch.equal(target[0], BLOCK)


def test_closing_does_not_wait_for_a_slow_link() -> None:
    begun = threading.Event()

    class Noticed(Queue):
        def take(self) -> CopyGroup[str] | None:
            begun.set()
            return super().take()

    with copying(Noticed(group("", torch.zeros(1, 128))), link_bytes_per_s=1e-6):
        assert begun.wait(60.0)


def test_next_group_starts_during_a_copy_and_none_is_done_early() -> None:
    device = LateDevice()
    targets = torch.zeros(4, 2, 128)
    queue = Queue()
    groups = [group(str(number), target, device) for number, target in enumerate(targets)]
    with copying(queue, device=device) as (copier, _):
        with device.hold():
            queue.groups.extend(groups)
            copier.wake()
            queue.wait_until_left(2)
            device.wait_until_awaited()
            assert len(queue.groups) == 2, "two are in flight, and no third is asked for"
            assert queue.turns == ["0"]
            assert not targets.any()
            assert not queue.done
        queue.wait_for(4)
    assert queue.done == [(str(number), None) for number in range(4)]
    assert queue.turns == ["0", "1", "2", "3"]
    assert torch.equal(targets, torch.stack([BLOCK, BLOCK + 1]).expand(4, 2, 128))
    assert device.faults == []


def test_caller_starts_an_idle_streams_first_groups_and_the_copier_continues() -> None:
    device = LateDevice()
    targets = torch.zeros(5, 2, 128)
    takers: list[int] = []

    class Asked(Queue):
        def take(self) -> CopyGroup[str] | None:
            takers.append(threading.get_ident())
            return super().take()

    with copying(queue := Asked(), device=device) as (copier, _):
        with device.hold():
            queue.wait_until_left(0)  # the copier has asked once, and waits to be woken
            takers.clear()
            queue.groups.extend(group(str(number), target, device) for number, target in enumerate(targets))
            copier.begin()
            assert takers == [threading.get_ident()] * 2
            assert queue.turns == ["0"]
            copier.begin()
            assert len(queue.groups) == 3, "the stream has something to do"
            assert not targets.any()
            copier.wake()
            device.wait_until_awaited()
        queue.wait_for(5)
    assert queue.done == [(str(number), None) for number in range(5)]
    assert queue.turns == [str(number) for number in range(5)]
    assert torch.equal(targets, torch.stack([BLOCK, BLOCK + 1]).expand(5, 2, 128))
    assert device.faults == []


def test_the_copier_thread_copies_if_starting_a_copy_blocks() -> None:
    targets = torch.zeros(2, 2, 128)
    with copying(queue := Queue()) as (copier, counts):
        queue.wait_until_left(0)
        queue.groups.extend(group(str(number), target) for number, target in enumerate(targets))
        copier.begin()
        assert len(queue.groups) == 2
        copier.wake()
        queue.wait_for(2)
        (worker,) = counts.by_thread()
    assert worker.thread != threading.get_native_id()


def test_failed_group_is_reported_once_none_of_it_is_in_flight() -> None:
    device = LateDevice()
    targets = torch.zeros(4, 2, 128)
    first, second, third, fourth = (group(str(number), target, device) for number, target in enumerate(targets))
    device.failing.add(0)
    device.unmarked.add(3)
    in_part = second._replace(copy=second.copy._replace(target_blocks=[0, 2]))
    with copying(queue := Queue(first, in_part, third, fourth), device=device):
        queue.wait_for(4)
    assert queue.done == [
        ("0", "the copy has failed"),
        ("1", "there is no block 2"),
        ("2", None),
        ("3", "the device has failed"),
    ]
    assert torch.equal(targets[1][0], BLOCK), "it had begun"
    assert torch.equal(targets[2], torch.stack([BLOCK, BLOCK + 1]))
    assert device.copies == 3
    assert device.faults == []


def test_closing_waits_for_running_copies_and_starts_none() -> None:
    device = LateDevice()
    targets = torch.zeros(3, 1, 128)
    queue = Queue()
    groups = [group(str(number), target, device) for number, target in enumerate(targets)]
    with copying(queue, device=device) as (copier, _):
        closing = threading.Thread(target=copier.close)
        with device.hold():
            queue.groups.extend(groups)
            copier.wake()
            queue.wait_until_left(1)
            device.wait_until_awaited()
            closing.start()
            closing.join(0.05)
            assert closing.is_alive()
            assert not queue.done
        closing.join(60.0)
        assert not closing.is_alive()
    assert queue.done == [("0", None), ("1", None)]
    assert len(queue.groups) == 1
