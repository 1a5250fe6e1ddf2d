"""What a rank's steps and copies run on: streams of work, marks in them, and host memory that copies can reach.

Work in one stream is done in its order; streams know nothing of each other but through marks. The terms, and what is
promised, are those of CUDA's streams and events (CUDA C++ Programming Guide, "Asynchronous Concurrent Execution").
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class BlockCopy(NamedTuple):
    """Blocks of an arena, and those of another that they are copied to.

    Attributes:
        source, target: the arenas, ``[blocks, elements]``, as many elements in both.
        source_blocks, target_blocks: which of theirs, as many; none of the target's twice.
    """

    source: Tensor
    source_blocks: Sequence[int]
    target: Tensor
    target_blocks: Sequence[int]

    @property
    def blocks(self) -> int:
        """How many blocks are copied."""
        return len(self.source_blocks)

    @property
    def size_bytes(self) -> int:
        """How much is copied."""
        return self.blocks * self.source.shape[1] * self.source.itemsize


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Block until all work before it is done.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


class Stream(Protocol):
    """Work that is done in its order, beside that of other streams."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a tensor between registered host memory and the device, or within the device.

        Both are in use until a mark says that they are not.

        Raises:
            RuntimeError: the device has failed, or they do not go together.
        """
        ...

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Begin to copy blocks of an arena to another; otherwise as :meth:`copy`.

        Args:
            copy: from where to where.
            until_s: time of the monotonic clock until which nobody waits for them.
        """
        ...

    def follow(self, mark: Mark) -> None:
        """Begin nothing more before the work before a mark of another stream is done. Returns at once."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind all work so far."""
        ...


class Graph(Protocol):
    """Work that is done anew with one call: on the same tensors, whatever they hold by then."""

    def replay(self) -> None:
        """Give all of it to the stream of the steps."""
        ...


class Exchange(Protocol):
    """What the stream of the steps does beside copies with memory that other processes read and write, in its order.

    Nothing here waits for the device. Other processes see what was copied before they see the signal after it, and what
    they write before a word is there once the word is. Host memory is registered; a word is one of 64 bits.
    """

    def signal(self, word: Tensor, value: int) -> None:
        """Write a word."""
        ...

    def wait_for(self, word: Tensor, value: int) -> None:
        """Do nothing more before a word is at least ``value``."""
        ...

    def add(self, source: Tensor, total: Tensor) -> None:
        """Add to a tensor of the device what then lies in host memory."""
        ...


class Device(Protocol):
    """Where a rank computes.

    Attributes:
        copies_ahead: groups of blocks that are given to a stream before the first of them is done.
        has_graphs: whether :meth:`capture` is to be used.
    """

    copies_ahead: int
    has_graphs: bool

    @property
    def steps(self) -> Stream:
        """The stream of whatever is computed."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run work of the steps' stream, and make a graph of it; it must not wait for the device.

        Raises:
            RuntimeError: the device has no graphs, or cannot capture this.
        """
        ...

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Let copies reach host memory; return what ends that.

        Raises:
            RuntimeError: the device does not take it.
        """
        ...

    def exchange(self) -> Exchange | None:
        """Return what the steps' stream can do with memory of other processes; None: steps are done on return.

        Raises:
            RuntimeError: the device cannot.
        """
        ...
