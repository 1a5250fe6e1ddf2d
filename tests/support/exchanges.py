"""A device's stream beside memory of other processes, on a CPU: in a thread of its own, or in the calling one."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lorikeet.worker.transfer.device import Cpu, StreamEvent, StreamSignals


def wait_for_word(word: Tensor, value: int) -> None:
    until_s = time.monotonic() + 60.0
    while word.item() < value:
        assert time.monotonic() < until_s, "nobody has written the word"
        time.sleep(1e-5)


class _Done:
    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def wait(self) -> None:
        self.future.result(60.0)


class ThreadExchange:
    """Does all in its order, in a thread of its own, as late as that comes to it.

    Attributes:
        goes_on: cleared, nothing is done.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def copy(self, rows: Tensor, target: Tensor) -> None:
        self._work.put(lambda: target.copy_(rows))

    def signal(self, word: Tensor, value: int) -> None:
        self._work.put(lambda: word.fill_(value))

    def wait_for(self, word: Tensor, value: int) -> None:
        self._work.put(lambda: wait_for_word(word, value))

    def add(self, source: Tensor, total: Tensor) -> None:
        self._work.put(lambda: total.add_(source))

    def record_event(self) -> StreamEvent:
        done = _Done()
        self._work.put(lambda: done.future.set_result(None))
        return done

    def end(self) -> None:
        """Do the rest."""
        self._work.put(None)
        self._thread.join(60.0)
        assert not self._thread.is_alive()

    @torch.inference_mode()
    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            assert self.goes_on.wait(60.0)
            work()


class PromptExchange:
    """Does all at once, in the calling thread.

    A device that waits would let that thread go on; ``meanwhile`` is what it does then.
    """

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def copy(self, rows: Tensor, target: Tensor) -> None:
        target.copy_(rows)

    def signal(self, word: Tensor, value: int) -> None:
        word.fill_(value)

    def wait_for(self, word: Tensor, value: int) -> None:
        self.meanwhile()
        wait_for_word(word, value)

    def add(self, source: Tensor, total: Tensor) -> None:
        total.add_(source)

    def record_event(self) -> StreamEvent:
        return Cpu()


class Exchanging(Cpu):
    """A CPU whose steps hand rows over as a device's do.

    Attributes:
        registered: memory that copies can reach now.
    """

    def __init__(self, exchange: "ThreadExchange | PromptExchange") -> None:
        super().__init__()
        self.registered: list[int] = []
        self._exchange = exchange

    @property
    def steps(self) -> Any:
        return self._exchange

    def signals(self) -> StreamSignals:
        return self._exchange

    def register(self, memory: Tensor) -> Callable[[], None]:
        address = memory.data_ptr()
        self.registered.append(address)
        return lambda: self.registered.remove(address)
