"""The shared memory of a rank and its host workers: a ring of slots, and tickets that say what they hold."""

import fcntl
import mmap
import os
import select
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorikeet.adapters.numbers import KEPT_AS

LOOKS = 10
"""Looks between two rests."""
NAP_S = 20e-6
_SPIN_S = 200e-6


class Backoff:
    """The rests of one wait, which begins now."""

    def __init__(self) -> None:
        self._naps_at_s = time.monotonic() + _SPIN_S

    def rest(self) -> None:
        """Let other threads run, those that copy above all; and sleep a little once the wait has become long.

        A sleep of no time takes as long as a nap does since Python 3.11 (python/cpython issue 125997), a select of
        nothing a microsecond.
        """
        nap(0 if time.monotonic() < self._naps_at_s else NAP_S)


def nap(seconds: float = NAP_S) -> None:
    """Sleep for a time that is far below a millisecond."""
    select.select((), (), (), seconds)


MAGIC = 0x6C6F72696B656574
VERSION = 1

_WORD_BYTES = 8
_LINE = 64 // _WORD_BYTES
_PAGE_BYTES = 4096
_HEADER = 2 * _LINE
_SLICE_WORDS = 4
_CUT_WORDS = 2
_TURNS = 4
"""More than ranks are apart."""
_TRANSFERS = 64
"""Of so many transfers it is known what has arrived with a rank; of older ones it seems that nothing has."""


class RingShape(msgspec.Struct, frozen=True):
    """Sizes of a ring.

    Attributes:
        slots: tickets whose x and y can be there at once.
        descriptors: tickets that can be described at once.
        rows: most rows of x in a ticket.
        inputs: elements of a row of x.
        outputs: elements of a row of y on one rank: those of q, k and v, in this order, side by side.
        ranks: tensor-parallel ranks. x is the same on all and there is one; each has a y of its own columns.
        workers: that share the rows.
        cuts: ways to cut rows that can be there at once.
        slices: most slices in a cut.
        dtype: of x and y, as in ``adapters.numbers.KEPT_AS``.
    """

    slots: int
    descriptors: int
    rows: int
    inputs: int
    outputs: int
    ranks: int
    workers: int
    cuts: int
    slices: int
    dtype: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes, as the header has them."""
        sizes = (self.slots, self.descriptors, self.rows, self.inputs, self.outputs)
        return (*sizes, self.ranks, self.workers, self.cuts, self.slices, list(KEPT_AS).index(self.dtype))


class RingSlice(NamedTuple):
    """Rows of a ticket for one worker.

    Attributes:
        worker: who computes them, -1 for the rank itself.
        adapter: its place in the list of the step's adapters.
        start: first row of x and y.
        rows: how many.
    """

    worker: int
    adapter: int
    start: int
    rows: int


class SlotError(RuntimeError):
    """What is to be written does not fit, or would overwrite what is still in use."""


class Ring:
    """See the module. Rank and workers each map the same memory.

    Args:
        fd: an anonymous file of the right size; owned by this object.
        shape: sizes.

    Attributes:
        fd: file descriptor.
        shape: sizes.
        memory: all of it, in bytes.
        x: ``[slots, rows, inputs]``, kept as ``KEPT_AS`` says.
        y: ``[slots, ranks, rows, outputs]``, likewise.
    """

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.fd = fd
        self.shape = shape
        places = _Places(shape)
        memory = mmap.mmap(fd, places.bytes)
        self.memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, places.words)
        self._flags = memoryview(memory)[: places.words * _WORD_BYTES].cast(
            "q"
        )  # a word of it takes a third of the time
        kept_as = np.dtype(KEPT_AS[shape.dtype])
        sizes = (shape.slots, shape.rows, shape.inputs), (shape.slots, shape.ranks, shape.rows, shape.outputs)
        self.x: NDArray[Any]
        self.y: NDArray[Any]
        self.x, self.y = (
            np.frombuffer(memory, kept_as, int(np.prod(size)), at).reshape(size)
            for size, at in zip(sizes, (places.x_bytes, places.y_bytes), strict=True)
        )
        self._places = places

    @classmethod
    def create(cls, shape: RingShape) -> "Ring":
        """Take memory from the system, of a size that nobody can change."""
        fd = os.memfd_create("lorikeet-host-lora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _Places(shape).bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made = cls(fd, shape)
        made._words[: 2 + len(shape.numbers)] = (MAGIC, VERSION, *shape.numbers)
        return made

    @classmethod
    def attached(cls, fd: int, shape: RingShape) -> "Ring":
        """Map the ring behind a file descriptor.

        Raises:
            ValueError: it is none, or of another shape.
        """
        found = cls(fd, shape)
        expected = (MAGIC, VERSION, *shape.numbers)
        if tuple(found._words[: len(expected)].tolist()) != expected:
            raise ValueError("the shared memory is not a ring of this shape")
        return found

    def close(self) -> None:
        """Close the file; arrays that are in use keep the memory."""
        os.close(self.fd)

    # --- of a step -----------------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """The number of the last step that has no more tickets."""
        return self._flags[self._places.ended]

    @ended.setter
    def ended(self, step: int) -> None:
        self._flags[self._places.ended] = step

    @property
    def is_shut_down(self) -> bool:
        """Whether workers are to end."""
        return bool(self._flags[self._places.shutdown])

    def shut_down(self) -> None:
        """Let workers end that look."""
        self._flags[self._places.shutdown] = 1

    # --- of a ticket ---------------------------------------------------------------------------------

    def slot(self, ticket: int) -> int:
        """Return where x and y of a ticket lie."""
        return ticket % self.shape.slots

    def check_free(self, ticket: int) -> None:
        """Do nothing if x of a ticket may be written.

        Raises:
            SlotError: what lies there has not been read.
        """
        before = ticket - self.shape.slots
        if before > 0 and self._flags[self._places.slot_free[ticket % self.shape.slots]] < before:
            raise SlotError(f"ticket {ticket} needs the slot of ticket {before}, which is still in use")

    def write_cut(self, cut: int, slices: Sequence[RingSlice]) -> None:
        """Write down how the rows of tickets are cut that are alike; those of all layers of a step often are.

        Args:
            cut: its number, counting from 1 as tickets do.
            slices: all rows of x.

        Raises:
            SlotError: there are too many slices.
        """
        if len(slices) > self.shape.slices:
            raise SlotError(f"cut {cut} has {len(slices)} slices, at most {self.shape.slices} fit")
        at = self._places.cut(cut)
        self._flags[at] = 0  # a worker that lags behind may be reading what was there
        first = at + _CUT_WORDS
        self._words[first : first + _SLICE_WORDS * len(slices)] = np.array(slices, np.int64).ravel()
        self._flags[at + 1] = len(slices)
        self._flags[at] = cut

    def cut(self, cut: int) -> list[RingSlice] | None:
        """Return the slices of a cut; None if another has taken its place.

        That cannot be while the rank waits for anything in it.
        """
        at = self._places.cut(cut)
        if self._flags[at] != cut:
            return None
        first = at + _CUT_WORDS
        end = first + _SLICE_WORDS * self._flags[at + 1]
        slices = [RingSlice(*row) for row in self._words[first:end].reshape(-1, _SLICE_WORDS).tolist()]
        return slices if self._flags[at] == cut else None

    def describe(self, ticket: int, step: int, layer: int, cut: int) -> None:
        """Say what a ticket is; to be done before its x is signalled.

        Args:
            ticket: which.
            step: that it belongs to, and whose adapters its slices name.
            layer: of the model.
            cut: of its rows.
        """
        at = self._places.descriptor(ticket)
        self._flags[at] = 0  # as in a cut
        self._flags[at + 1] = step
        self._flags[at + 2] = layer
        self._flags[at + 3] = cut
        self._flags[at] = ticket

    def step(self, ticket: int) -> int:
        """Return the step that a ticket belongs to whose x is ready."""
        return self._flags[self._places.descriptor(ticket) + 1]

    def description(self, ticket: int) -> tuple[int, int] | None:
        """Return layer and cut of a ticket whose x is ready; None if another ticket has taken its place."""
        at = self._places.descriptor(ticket)
        found, layer, cut = self._flags[at], self._flags[at + 2], self._flags[at + 3]
        return (layer, cut) if found == ticket == self._flags[at] else None

    def signal_x(self, ticket: int) -> None:
        """Let the workers begin: x and the description are written."""
        self._flags[self._places.x_ready[ticket % self.shape.slots]] = ticket

    def x_word(self, ticket: int) -> NDArray[np.int64]:
        """Return the word that :meth:`signal_x` writes, for a device that does so itself."""
        return self._word(self._places.x_ready[ticket % self.shape.slots])

    def has_x(self, ticket: int) -> bool:
        """Tell whether a worker may begin with a ticket."""
        return bool(self._flags[self._places.x_ready[ticket % self.shape.slots]] >= ticket)

    def signal_y(self, ticket: int, worker: int, began_ns: int, ended_ns: int) -> None:
        """Say that a worker has written its rows of y, and when it began and ended to (of the monotonic clock)."""
        at = self._places.y_ready(ticket % self.shape.slots, worker)
        self._flags[at + 1] = began_ns
        self._flags[at + 2] = ended_ns
        self._flags[at] = ticket

    def y_word(self, ticket: int, worker: int) -> NDArray[np.int64]:
        """Return the word that becomes the ticket, or more, once a worker has written its rows of y."""
        return self._word(self._places.y_ready(ticket % self.shape.slots, worker))

    def has_y(self, ticket: int, worker: int) -> bool:
        """Tell whether a worker has written its rows of a ticket."""
        return bool(self._flags[self._places.y_ready(ticket % self.shape.slots, worker)] >= ticket)

    def times_ns(self, ticket: int, worker: int) -> tuple[int, int]:
        """Return when a worker began and ended, of a ticket whose y it has written."""
        at = self._places.y_ready(ticket % self.shape.slots, worker)
        return self._flags[at + 1], self._flags[at + 2]

    def signal_error(self, ticket: int, worker: int) -> None:
        """Say that a worker cannot compute a ticket and writes nothing any more."""
        self._flags[self._places.error[worker]] = ticket

    def has_error(self, ticket: int, worker: int) -> bool:
        """Tell whether a worker could not compute a ticket."""
        return bool(self._flags[self._places.error[worker]] == ticket)

    def free(self, ticket: int) -> None:
        """Let the slot of a ticket be used again: y has been read."""
        self._flags[self._places.slot_free[ticket % self.shape.slots]] = ticket

    # --- between ranks -------------------------------------------------------------------------------

    def signal_turn(self, turn: int, ticket: int) -> None:
        """Tell the other ranks which ticket the next layer of an assisted step has, 0 for none."""
        at = self._places.turns[turn % _TURNS]
        self._flags[at + 1] = ticket
        self._flags[at] = turn

    def turn(self, turn: int) -> int | None:
        """Return the ticket of a layer, 0 for none; None as long as rank 0 has not said."""
        at = self._places.turns[turn % _TURNS]
        return self._flags[at + 1] if self._flags[at] == turn else None

    def signal_collected(self, ticket: int) -> None:
        """Tell the other ranks that all of a ticket's y is there."""
        self._flags[self._places.collected] = ticket

    def has_all(self, ticket: int) -> bool:
        """Tell whether all of a ticket's y is there."""
        return bool(self._flags[self._places.collected] >= ticket)

    def note_arrived(self, rank: int, transfer_id: int, blocks: int) -> None:
        """Tell rank 0 how many blocks of a transfer have arrived with another rank; -1: no more will."""
        at = self._places.arrived(rank, transfer_id)
        self._flags[at] = -1  # whose number it is, is known again once it is there
        self._flags[at + 1] = blocks
        self._flags[at] = transfer_id

    def arrived(self, rank: int, transfer_id: int) -> int:
        """Return how many blocks of a transfer have arrived with a rank, as far as it has told; -1: no more will."""
        at = self._places.arrived(rank, transfer_id)
        found, blocks = self._flags[at], self._flags[at + 1]
        return blocks if found == transfer_id == self._flags[at] else 0

    def _word(self, at: int) -> NDArray[np.int64]:
        return self._words[at : at + 1]


class _Places:
    """Where everything lies: flags as indexes of words, x and y in bytes."""

    def __init__(self, shape: RingShape) -> None:
        self._shape = shape
        self.shutdown = _HEADER
        self.ended = self.shutdown + _LINE
        self.x_ready = [self.ended + (1 + slot) * _LINE for slot in range(shape.slots)]
        self.slot_free = [self.x_ready[-1] + (1 + slot) * _LINE for slot in range(shape.slots)]
        self.error = [self.slot_free[-1] + (1 + worker) * _LINE for worker in range(shape.workers)]
        self.collected = self.error[-1] + _LINE
        self.turns = [self.collected + (1 + turn) * _LINE for turn in range(_TURNS)]
        self._arrived = self.turns[-1] + _LINE
        self._y_ready = self._arrived + shape.ranks * _TRANSFERS * _LINE
        self._descriptors = self._y_ready + shape.slots * (1 + shape.workers) * _LINE
        self._cuts = self._descriptors + shape.descriptors * _LINE
        self._cut_words = _rounded(_CUT_WORDS + _SLICE_WORDS * shape.slices, _LINE)
        self.words = self._cuts + shape.cuts * self._cut_words
        item_bytes = np.dtype(KEPT_AS[shape.dtype]).itemsize
        self.x_bytes = _rounded(self.words * _WORD_BYTES, _PAGE_BYTES)
        self.y_bytes = self.x_bytes + _rounded(shape.slots * shape.rows * shape.inputs * item_bytes, _PAGE_BYTES)
        self.bytes = self.y_bytes + shape.slots * shape.ranks * shape.rows * shape.outputs * item_bytes

    def y_ready(self, slot: int, worker: int) -> int:
        """The times of a ticket share the line: whoever reads them has just read the flag. The rank is worker -1."""
        return self._y_ready + (slot * (1 + self._shape.workers) + 1 + worker) * _LINE

    def arrived(self, rank: int, transfer_id: int) -> int:
        return self._arrived + (rank * _TRANSFERS + transfer_id % _TRANSFERS) * _LINE

    def descriptor(self, ticket: int) -> int:
        return self._descriptors + ticket % self._shape.descriptors * _LINE

    def cut(self, cut: int) -> int:
        return self._cuts + cut % self._shape.cuts * self._cut_words


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
