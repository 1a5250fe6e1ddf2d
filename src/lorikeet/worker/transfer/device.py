"""Devices for steps and copies: streams, events, graphs and registered host memory, for CPU and CUDA."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lorikeet.kernels.native import NativeUnavailableError, best_library, native_copy


class BlockCopy(NamedTuple):
    """A copy of blocks from one arena to another.

    Attributes:
        source, target: the arenas, ``[blocks, elements]``, with the same number of elements per block.
        source_blocks, target_blocks: block indices, of the same number. No target block occurs twice.
    """

    source: Tensor
    source_blocks: Sequence[int]
    target: Tensor
    target_blocks: Sequence[int]

    @property
    def blocks(self) -> int:
        """Number of blocks to copy."""
        return len(self.source_blocks)

    @property
    def size_bytes(self) -> int:
        """Number of bytes to copy."""
        return self.blocks * self.source.shape[1] * self.source.itemsize


class StreamEvent(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block until all work before this point is finished.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


class Stream(Protocol):
    """A queue of work that runs in order, concurrently with other streams."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy of a tensor between registered host memory and the device, or within the device.

        Both tensors are in use until an event after the copy has happened.

        Raises:
            RuntimeError: the device has failed, or the shapes do not match.
        """
        ...

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Queue a copy of blocks.

        Errors are those of :meth:`copy`.

        Args:
            copy: the blocks to copy.
            until_s: time, on the monotonic clock, until which the copy may yield to other threads.
        """
        ...

    def wait_event(self, event: StreamEvent) -> None:
        """Make later work wait for an event of another stream. Returns immediately."""
        ...

    def record_event(self) -> StreamEvent:
        """Return an event that happens after all work queued so far."""
        ...


class Graph(Protocol):
    """Captured work that can be replayed on the same tensors, with the tensors' current content."""

    def replay(self) -> None:
        """Queue the captured work in the stream of steps."""
        ...


class StreamSignals(Protocol):
    """Signals between the stream of steps and other processes, through registered host memory, in stream order.

    Methods only queue work. Other processes see a copy before a signal that follows it. The stream sees the data that
    another process wrote before it wrote a word. A word has 64 bits.
    """

    def signal(self, word: Tensor, value: int) -> None:
        """Queue a write of a word."""
        ...

    def wait_for(self, word: Tensor, value: int) -> None:
        """Make later work wait until a word is at least ``value``."""
        ...

    def add(self, source: Tensor, total: Tensor) -> None:
        """Queue ``total += source``.

        ``total`` is on the device, and ``source`` in host memory, which is read at this point of the stream.
        """
        ...


class DeviceBackend(Protocol):
    """The device of a rank.

    Attributes:
        copies_ahead: maximum number of groups of blocks to queue in a copy stream.
        has_graphs: whether the device can :meth:`capture`.
    """

    copies_ahead: int
    has_graphs: bool

    @property
    def steps(self) -> Stream:
        """The stream in which steps are computed."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run work in the stream of steps and capture it as a graph.

        The work must not wait for the device.

        Raises:
            RuntimeError: the device has no graphs, or cannot capture the work.
        """
        ...

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Register host memory for copies, and return a function that unregisters the memory.

        Raises:
            RuntimeError: the device cannot register the memory.
        """
        ...

    def signals(self) -> StreamSignals | None:
        """Return the signals of the stream of steps.

        None for a synchronous device, which needs no signals.

        Raises:
            RuntimeError: the driver does not support signals.
        """
        ...


class Cpu:
    """The CPU, a synchronous device.

    Work is done when a method returns. The object is also its stream and its event.
    """

    copies_ahead = 1
    has_graphs = False

    def __init__(self) -> None:
        try:
            self._library: ctypes.CDLL | None = best_library()[1]
        except NativeUnavailableError:  # The choice of kernels reports a missing library.
            self._library = None

    @property
    def steps(self) -> Stream:
        """The only stream."""
        return self

    def stream(self) -> Stream:
        """Return the only stream."""
        return self

    def capture(self, work: Callable[[], None]) -> Graph:
        """Raise an error, since a CPU has no launch overhead to save."""
        raise RuntimeError("a CPU has no graphs")

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Do nothing, since all memory can be copied."""
        return lambda: None

    def signals(self) -> StreamSignals | None:
        """Return None, since the caller writes and waits itself."""
        return None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor."""
        target.copy_(source)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Copy blocks. The native library, if available, bypasses the caches and yields to other threads."""
        if self._library is not None:
            native_copy(self._library, *copy, until_s)
            return
        for source, target in zip(copy.source_blocks, copy.target_blocks, strict=True):
            copy.target[target].copy_(copy.source[source])

    def wait_event(self, event: StreamEvent) -> None:
        """Do nothing, since all work is done."""

    def record_event(self) -> StreamEvent:
        """Return this object."""
        return self

    def wait(self) -> None:
        """Do nothing, since all work is done."""


class CudaEvent:
    """An event in a CUDA stream.

    Attributes:
        event: torch's event.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Block until the event has happened. The thread sleeps and does not hold the interpreter lock."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream.

    Attributes:
        stream: torch's stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue the copy for the device's copy engines."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Queue the copies for the device's copy engines."""
        with torch.cuda.stream(self.stream):
            for source, target in zip(copy.source_blocks, copy.target_blocks, strict=True):
                copy.target[target].copy_(copy.source[source], non_blocking=True)

    def wait_event(self, event: StreamEvent) -> None:
        """Let the stream wait for an event of this device."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record_event(self) -> StreamEvent:
        """Record an event."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return CudaEvent(event)


class CudaStreamSignals:
    """Signals with the stream memory operations of the CUDA driver.

    Implements ``StreamSignals``.

    A waiting stream occupies no multiprocessor. Registered memory is assumed to have the same address on the device,
    which holds except on integrated GPUs.

    Args:
        steps: the stream of steps.

    Raises:
        RuntimeError: the driver has no such operations.
    """

    def __init__(self, steps: torch.cuda.Stream) -> None:
        self._stream = steps
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            # These are the symbols behind the header's names since CUDA 11.7.
            self._write = driver.cuStreamWriteValue64_v2
            self._wait = driver.cuStreamWaitValue64_v2
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the CUDA driver has no stream memory operations: {error}") from error
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)

    def signal(self, word: Tensor, value: int) -> None:
        """Queue a write after a memory fence, which is the driver's default."""
        self._call(self._write, word, value)

    def wait_for(self, word: Tensor, value: int) -> None:
        """Queue a wait for a value of at least ``value``, which is the driver's default comparison."""
        self._call(self._wait, word, value)

    def add(self, source: Tensor, total: Tensor) -> None:
        """Queue a copy and an addition."""
        total.add_(source.to(total.device, non_blocking=True))

    def _call(self, function: Any, word: Tensor, value: int) -> None:
        if code := function(self._stream.cuda_stream, word.data_ptr(), value, 0):
            raise RuntimeError(f"a stream memory operation failed: CUDA error {code}")


class Cuda:
    """A CUDA device.

    The object must be created on the thread that runs the steps, whose current stream becomes the stream of steps.

    Args:
        place: the torch device.
    """

    copies_ahead = 8
    """The queued groups keep the copy engines busy while Python handles the end of a copy and queues the next."""
    has_graphs = True

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._capturing = torch.cuda.Stream(place)
        self._graph_memory: Any = None  # torch's type for it is private.
        self._steps = CudaStream(torch.cuda.current_stream(place))

    @property
    def steps(self) -> Stream:
        """The current stream of the thread that created this object."""
        return self._steps

    def stream(self) -> Stream:
        """Return a new stream, which does not synchronise with the default stream."""
        return CudaStream(torch.cuda.Stream(self._place))

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run the work twice: once to compile kernels and allocate workspaces, and once to capture a graph.

        Graphs are replayed one at a time, so all graphs share one memory pool for intermediate tensors. This requires
        that they are captured in the same stream.
        """
        steps = torch.cuda.current_stream(self._place)
        beside = self._capturing
        beside.wait_stream(steps)
        with torch.cuda.stream(beside):
            work()
        steps.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # With thread_local, copy threads continue during the capture.
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=beside, capture_error_mode="thread_local"):
            work()
        self._graph_memory = graph.pool()
        return graph

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Lock the memory's pages, which allocates all of them."""
        if not memory.nbytes:
            return lambda: None
        with torch.cuda.device(self._place):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        return lambda: self._unregister(memory)

    def signals(self) -> StreamSignals | None:
        """Return the signals of the stream of steps."""
        return CudaStreamSignals(self._steps.stream)

    def _unregister(self, memory: Tensor) -> None:
        with torch.cuda.device(self._place):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))


def device_at(place: torch.device) -> DeviceBackend:
    """Return the device backend for a ``torch.device``."""
    return Cpu() if place.type == "cpu" else Cuda(place)
