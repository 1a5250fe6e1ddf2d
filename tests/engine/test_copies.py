"""Copiers: a few blocks after the other, over a link that has its speed."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lorikeet.engine.copies import Copier, Group
from lorikeet.engine.transfer_counts import TransferCounts, Work, Worker

BLOCK = torch.arange(128, dtype=torch.float32)


class Queue:
    """Groups to be copied, and what became of them."""

    def __init__(self, *groups: Group[str]) -> None:
        self.groups = deque(groups)
        self.done: list[tuple[str, str | None]] = []
        self.changed = threading.Condition()

    def take(self) -> Group[str] | None:
        return self.groups.popleft() if self.groups else None

    def note(self, group: Group[str], error: str | None) -> None:
        with self.changed:
            self.done.append((group.job, error))
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) == count, 60.0)


def group(name: str, targets: Tensor) -> Group[str]:
    """Copies of ``BLOCK``, each with another number added."""
    return Group(name, [BLOCK + i for i in range(len(targets))], list(targets))


@contextmanager
def copying(queue: Queue, link_bytes_per_s: float = 0.0) -> Iterator[tuple[Copier[str], TransferCounts]]:
    """A copier at work."""
    counts = TransferCounts()
    copier = Copier("copier", queue.take, queue.note, link_bytes_per_s, counts)
    try:
        yield copier, counts
    finally:
        copier.close()


def test_groups_are_copied_in_the_order_in_which_they_are_given_out_and_their_blocks_counted() -> None:
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
    assert (worker.work, times) == (Work.COPY, 6)
    assert worker != Worker(Work.COPY, threading.get_native_id())


def test_a_copy_that_fails_says_why_and_stops_nothing() -> None:
    target = torch.zeros(1, 128)
    queue = Queue(Group("wrong", [BLOCK[:100]], [target[0]]), group("right", target))
    with copying(queue):
        queue.wait_for(2)
    (wrong, error), right = queue.done
    assert wrong == "wrong"
    assert "size" in (error or "")
    assert right == ("right", None)
    assert torch.equal(target[0], BLOCK)


def test_blocks_take_the_time_that_the_link_needs() -> None:
    rate = BLOCK.nbytes * 1000.0
    queue = Queue(*(group("", torch.zeros(4, 128)) for _ in range(5)))
    started_s = time.monotonic()
    with copying(queue, rate):
        queue.wait_for(5)
        assert time.monotonic() - started_s >= 20 * BLOCK.nbytes / rate


def test_closing_does_not_wait_for_a_slow_link() -> None:
    begun = threading.Event()

    class Noticed(Queue):
        def take(self) -> Group[str] | None:
            begun.set()
            return super().take()

    with copying(Noticed(group("", torch.zeros(1, 128))), link_bytes_per_s=1e-6):
        assert begun.wait(60.0)
