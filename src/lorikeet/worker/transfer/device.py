"""What steps and copies run on: streams, events, graphs and pinned host memory, for CPU and CUDA."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lorikeet.kernels.native import NativeUnavailableError, best_library, native_copy


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


class StreamEvent(Protocol):
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

    def follow(self, mark: StreamEvent) -> None:
        """Begin nothing more before the work before a mark of another stream is done. Returns at once."""
        ...

    def mark(self) -> StreamEvent:
        """Return a mark behind all work so far."""
        ...


class Graph(Protocol):
    """Work that is done anew with one call: on the same tensors, whatever they hold by then."""

    def replay(self) -> None:
        """Give all of it to the stream of the steps."""
        ...


class StreamSignals(Protocol):
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


class DeviceBackend(Protocol):
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

    def exchange(self) -> StreamSignals | None:
        """Return what the steps' stream can do with memory of other processes; None: steps are done on return.

        Raises:
            RuntimeError: the device cannot.
        """
        ...


class Cpu:
    """Whatever is asked for is done on return. See ``DeviceBackend``; it is its own stream and mark."""

    copies_ahead = 1
    has_graphs = False

    def __init__(self) -> None:
        try:
            self._library: ctypes.CDLL | None = best_library()[1]
        except NativeUnavailableError:  # whoever chooses kernels tells the user
            self._library = None

    @property
    def steps(self) -> Stream:
        """The only one."""
        return self

    def stream(self) -> Stream:
        """Return the only one."""
        return self

    def capture(self, work: Callable[[], None]) -> Graph:
        """There is nothing to be won: a call costs no more than its work."""
        raise RuntimeError("a CPU has no graphs")

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Copies reach all memory."""
        return lambda: None

    def exchange(self) -> StreamSignals | None:
        """Whoever calls writes and waits itself."""
        return None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Copy; past the caches and giving way to other threads, where the native library can be used."""
        if self._library is not None:
            native_copy(self._library, *copy, until_s)
            return
        for taken, put in zip(copy.source_blocks, copy.target_blocks, strict=True):
            copy.target[put].copy_(copy.source[taken])

    def follow(self, mark: StreamEvent) -> None:
        """All work is done."""

    def mark(self) -> StreamEvent:
        """Return this object."""
        return self

    def wait(self) -> None:
        """All work is done."""


class CudaEvent:
    """An event in a stream.

    Attributes:
        event: it.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Block until it has happened; the thread sleeps, and holds no lock of the interpreter's."""
        self.event.synchronize()


class CudaStream:
    """A stream of the device.

    Attributes:
        stream: torch's.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Give the copy to the device's copy engines."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Give the copies to the device's copy engines."""
        with torch.cuda.stream(self.stream):
            for taken, put in zip(copy.source_blocks, copy.target_blocks, strict=True):
                copy.target[put].copy_(copy.source[taken], non_blocking=True)

    def follow(self, mark: StreamEvent) -> None:
        """Let the stream wait for an event of this device."""
        assert isinstance(mark, CudaEvent)
        self.stream.wait_event(mark.event)

    def mark(self) -> StreamEvent:
        """Record an event."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return CudaEvent(event)


class CudaStreamSignals:
    """See ``StreamSignals``; words are the driver's affair (CUDA Driver API, "Stream Memory Operations").

    The stream sleeps until a word is there, and takes none of the device's multiprocessors for that. Registered memory
    has the same address on the device, as it does everywhere but on integrated GPUs.

    Args:
        steps: the steps' stream.

    Raises:
        RuntimeError: the driver has no such operations.
    """

    def __init__(self, steps: torch.cuda.Stream) -> None:
        self._stream = steps
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            # The names behind those of the header since CUDA 11.7.
            self._write, self._wait = driver.cuStreamWriteValue64_v2, driver.cuStreamWaitValue64_v2
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the driver cannot signal in a stream: {error}") from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)

    def signal(self, word: Tensor, value: int) -> None:
        """Write behind a fence, which is the default."""
        self._do(self._write, word, value)

    def wait_for(self, word: Tensor, value: int) -> None:
        """Wait until it is as large or larger, which is the default."""
        self._do(self._wait, word, value)

    def add(self, source: Tensor, total: Tensor) -> None:
        """Copy, then add."""
        total.add_(source.to(total.device, non_blocking=True))

    def _do(self, function: Any, word: Tensor, value: int) -> None:
        if code := function(self._stream.cuda_stream, word.data_ptr(), value, 0):
            raise RuntimeError(f"the driver does not signal in a stream: CUDA error {code}")


class Cuda:
    """See ``DeviceBackend``. To be made on the thread that runs the steps: their stream is that thread's current one.

    Args:
        place: which device.
    """

    copies_ahead = 8
    """So much is done in the time that Python takes to hear of an end and to ask for more."""
    has_graphs = True

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._capturing = torch.cuda.Stream(place)
        self._graph_memory: Any = None  # a type that torch does not name in public
        self._steps = CudaStream(torch.cuda.current_stream(place))

    @property
    def steps(self) -> Stream:
        """The stream of the thread that made this object."""
        return self._steps

    def stream(self) -> Stream:
        """Return a stream that the default stream does not wait for."""
        return CudaStream(torch.cuda.Stream(self._place))

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run it twice: once so that kernels are compiled and libraries have their workspaces, once to be captured.

        One graph is replayed at a time, so that all use the same memory for what lies between their kernels; for that
        they must be captured in the same stream.
        """
        steps, beside = torch.cuda.current_stream(self._place), self._capturing
        beside.wait_stream(steps)
        with torch.cuda.stream(beside):
            work()
        steps.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Threads that copy go on meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=beside, capture_error_mode="thread_local"):
            work()
        self._graph_memory = graph.pool()
        return graph

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Lock the memory's pages; all of it is taken from the system now."""
        if not memory.nbytes:
            return lambda: None
        with torch.cuda.device(self._place):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        return lambda: self._unregister(memory)

    def exchange(self) -> StreamSignals | None:
        """Return what the steps' stream can do."""
        return CudaStreamSignals(self._steps.stream)

    def _unregister(self, memory: Tensor) -> None:
        with torch.cuda.device(self._place):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))


def device_at(place: torch.device) -> DeviceBackend:
    """Return what computes with tensors at ``place``."""
    return Cpu() if place.type == "cpu" else Cuda(place)
