"""Shared memory between a rank and its host workers: a ring of slots for x and y, and tickets that describe the slots.

The rank writes x of a layer into a slot and signals a ticket; each worker computes its slices of y and signals them.
Flags are words that one process writes and others poll. A flag is written after the data that it announces; readers
rely on the order of stores of x86.
"""

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

POLLS = 10
"""Polls of a flag between two sleeps."""
SLEEP_S = 20e-6
_SPIN_S = 200e-6


class Backoff:
    """The pauses of one wait, which begins now. The first pauses only yield, later pauses sleep."""

    def __init__(self) -> None:
        self._sleep_at_s = time.monotonic() + _SPIN_S

    def pause(self) -> None:
        """Let other threads run, such as copy threads, and sleep a little once the wait has become long.

        Since Python 3.11 ``time.sleep(0)`` takes as long as a short sleep (python/cpython issue 125997); a select
        without file descriptors takes a microsecond.
        """
        short_sleep(0 if time.monotonic() < self._sleep_at_s else SLEEP_S)


def short_sleep(seconds: float = SLEEP_S) -> None:
    """Sleep for much less than a millisecond."""
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
"""Number of turns that are kept; ranks are fewer turns apart."""
_TRANSFERS = 64
"""Number of transfers whose arrival on a rank is kept; older ones count as not arrived."""


class RingShape(msgspec.Struct, frozen=True):
    """Sizes of a ring.

    Attributes:
        slots: the number of tickets whose x and y are kept.
        descriptors: number of tickets whose descriptions are kept.
        rows: the maximum number of rows of x in a ticket.
        inputs: elements of a row of x of the widest product.
        outputs: elements of a row of y of the widest product on one rank, its modules concatenated.
        ranks: tensor-parallel ranks. The ranks share one x. Each rank has a y with its own columns.
        workers: number of workers that share the rows.
        cuts: number of cuts that are kept. A cut is a division of rows among workers.
        slices: the maximum number of slices in a cut.
        dtype: dtype of x and y, a key of ``adapters.numbers.KEPT_AS``.
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
        """All sizes, in the order in which the header stores them."""
        sizes = (self.slots, self.descriptors, self.rows, self.inputs, self.outputs)
        return (*sizes, self.ranks, self.workers, self.cuts, self.slices, list(KEPT_AS).index(self.dtype))


class RingSlice(NamedTuple):
    """Rows of a ticket for one worker.

    Attributes:
        worker: the worker's number, -1 for the rank itself.
        adapter: index of the adapter in the step's list.
        start: first row of x and y.
        rows: number of rows.
    """

    worker: int
    adapter: int
    start: int
    rows: int


class SlotError(RuntimeError):
    """Raised when data does not fit, or would overwrite data that is still in use."""


class Ring:
    """A ring of slots, which the rank and each worker map from the same shared memory.

    Args:
        fd: an anonymous file of the right size. The ring owns the descriptor.
        shape: sizes.

    Attributes:
        fd: file descriptor.
        shape: sizes.
        memory: the whole memory, as bytes.
        x: ``[slots, rows, inputs]``, of the storage type in ``KEPT_AS``.
        y: ``[slots, ranks, rows, outputs]``, of the same type.
    """

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.fd = fd
        self.shape = shape
        offsets = _Offsets(shape)
        memory = mmap.mmap(fd, offsets.bytes)
        self.memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, offsets.words)
        self._flags = memoryview(memory)[: offsets.words * _WORD_BYTES].cast(
            "q"
        )  # Access to a memoryview takes a third of the time of access to a numpy array.
        kept_as = np.dtype(KEPT_AS[shape.dtype])
        sizes = (shape.slots, shape.rows, shape.inputs), (shape.slots, shape.ranks, shape.rows, shape.outputs)
        self.x: NDArray[Any]
        self.y: NDArray[Any]
        self.x, self.y = (
            np.frombuffer(memory, kept_as, int(np.prod(size)), at).reshape(size)
            for size, at in zip(sizes, (offsets.x_bytes, offsets.y_bytes), strict=True)
        )
        self._offsets = offsets

    @classmethod
    def create(cls, shape: RingShape) -> "Ring":
        """Allocate the memory as an anonymous file, sealed against changes of its size."""
        fd = os.memfd_create("lorikeet-host-lora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _Offsets(shape).bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made = cls(fd, shape)
        made._words[: 2 + len(shape.numbers)] = (MAGIC, VERSION, *shape.numbers)
        return made

    @classmethod
    def attached(cls, fd: int, shape: RingShape) -> "Ring":
        """Map the ring behind a file descriptor.

        Raises:
            ValueError: the memory is not a ring, or has another shape.
        """
        found = cls(fd, shape)
        expected = (MAGIC, VERSION, *shape.numbers)
        if tuple(found._words[: len(expected)].tolist()) != expected:
            raise ValueError("the shared memory is not a ring of this shape")
        return found

    def close(self) -> None:
        """Close the file. Arrays that are in use keep the memory."""
        os.close(self.fd)

    # --- steps ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """Number of the last step that has ended."""
        return self._flags[self._offsets.ended]

    @ended.setter
    def ended(self, step: int) -> None:
        self._flags[self._offsets.ended] = step

    @property
    def is_shut_down(self) -> bool:
        """Whether workers must stop."""
        return bool(self._flags[self._offsets.shutdown])

    def shut_down(self) -> None:
        """Make polling workers stop."""
        self._flags[self._offsets.shutdown] = 1

    # --- tickets -------------------------------------------------------------------------------------

    def slot(self, ticket: int) -> int:
        """Return the slot of a ticket's x and y."""
        return ticket % self.shape.slots

    def check_free(self, ticket: int) -> None:
        """Check that x of a ticket may be written.

        Raises:
            SlotError: the slot's previous y has not been read.
        """
        before = ticket - self.shape.slots
        if before > 0 and self._flags[self._offsets.slot_free[ticket % self.shape.slots]] < before:
            raise SlotError(f"ticket {ticket} needs the slot of ticket {before}, which is still in use")

    def write_cut(self, cut: int, slices: Sequence[RingSlice]) -> None:
        """Write a cut, to which tickets refer.

        Often all layers of a step use the same cut.

        Args:
            cut: the cut's number, counting from 1 like tickets.
            slices: the cut's slices, which together are all rows of x.

        Raises:
            SlotError: there are too many slices.
        """
        if len(slices) > self.shape.slices:
            raise SlotError(f"cut {cut} has {len(slices)} slices, at most {self.shape.slices} fit")
        at = self._offsets.cut(cut)
        self._flags[at] = 0  # The entry is invalid while it is written, since a slow worker may be reading the old cut.
        first = at + _CUT_WORDS
        self._words[first : first + _SLICE_WORDS * len(slices)] = np.array(slices, np.int64).ravel()
        self._flags[at + 1] = len(slices)
        self._flags[at] = cut

    def cut(self, cut: int) -> list[RingSlice] | None:
        """Return the slices of a cut; None if the cut was overwritten.

        A cut is not overwritten while the rank waits for one of its slices.
        """
        at = self._offsets.cut(cut)
        if self._flags[at] != cut:
            return None
        first = at + _CUT_WORDS
        end = first + _SLICE_WORDS * self._flags[at + 1]
        slices = [RingSlice(*row) for row in self._words[first:end].reshape(-1, _SLICE_WORDS).tolist()]
        return slices if self._flags[at] == cut else None

    def describe(self, ticket: int, step: int, site: int, cut: int) -> None:
        """Write the description of a ticket, before :meth:`signal_x`.

        Args:
            ticket: its number.
            step: its step, whose adapters the slices refer to.
            site: number of a product of a layer (``worker.host_lora.worker.site_of``).
            cut: number of the cut of its rows.
        """
        at = self._offsets.descriptor(ticket)
        self._flags[at] = 0  # The entry is invalid while it is written.
        self._flags[at + 1] = step
        self._flags[at + 2] = site
        self._flags[at + 3] = cut
        self._flags[at] = ticket

    def step(self, ticket: int) -> int:
        """Return the step of a ticket whose x is ready."""
        return self._flags[self._offsets.descriptor(ticket) + 1]

    def description(self, ticket: int) -> tuple[int, int] | None:
        """Return site and cut of a ticket whose x is ready; None if the description was overwritten."""
        at = self._offsets.descriptor(ticket)
        found = self._flags[at]
        site = self._flags[at + 2]
        cut = self._flags[at + 3]
        return (site, cut) if found == ticket == self._flags[at] else None

    def signal_x(self, ticket: int) -> None:
        """Signal that x and the description of a ticket are written, so that workers begin."""
        self._flags[self._offsets.x_ready[ticket % self.shape.slots]] = ticket

    def x_word(self, ticket: int) -> NDArray[np.int64]:
        """Return the word that :meth:`signal_x` writes, for a device that writes the word itself."""
        return self._word(self._offsets.x_ready[ticket % self.shape.slots])

    def has_x(self, ticket: int) -> bool:
        """Return whether x of a ticket is ready."""
        return bool(self._flags[self._offsets.x_ready[ticket % self.shape.slots]] >= ticket)

    def signal_y(self, ticket: int, worker: int, began_ns: int, ended_ns: int) -> None:
        """Signal that a worker has written its rows of y, with its start and end on the monotonic clock."""
        at = self._offsets.y_ready(ticket % self.shape.slots, worker)
        self._flags[at + 1] = began_ns
        self._flags[at + 2] = ended_ns
        self._flags[at] = ticket

    def y_word(self, ticket: int, worker: int) -> NDArray[np.int64]:
        """Return the word that a worker sets to the ticket's number once it has written its rows of y."""
        return self._word(self._offsets.y_ready(ticket % self.shape.slots, worker))

    def has_y(self, ticket: int, worker: int) -> bool:
        """Return whether a worker has written its rows of a ticket."""
        return bool(self._flags[self._offsets.y_ready(ticket % self.shape.slots, worker)] >= ticket)

    def times_ns(self, ticket: int, worker: int) -> tuple[int, int]:
        """Return when a worker started and ended a ticket whose y it has written."""
        at = self._offsets.y_ready(ticket % self.shape.slots, worker)
        return self._flags[at + 1], self._flags[at + 2]

    def signal_error(self, ticket: int, worker: int) -> None:
        """Signal that a worker has failed on a ticket and writes nothing more."""
        self._flags[self._offsets.error[worker]] = ticket

    def has_error(self, ticket: int, worker: int) -> bool:
        """Return whether a worker has failed on a ticket."""
        return bool(self._flags[self._offsets.error[worker]] == ticket)

    def free(self, ticket: int) -> None:
        """Free the slot of a ticket whose y has been read."""
        self._flags[self._offsets.slot_free[ticket % self.shape.slots]] = ticket

    # --- between ranks -------------------------------------------------------------------------------

    def signal_turn(self, turn: int, ticket: int) -> None:
        """Publish the first ticket of the next layer of an assisted step to the other ranks; 0 for none."""
        at = self._offsets.turns[turn % _TURNS]
        self._flags[at + 1] = ticket
        self._flags[at] = turn

    def turn(self, turn: int) -> int | None:
        """Return the ticket of a layer, 0 for none; None until rank 0 has published it."""
        at = self._offsets.turns[turn % _TURNS]
        return self._flags[at + 1] if self._flags[at] == turn else None

    def signal_collected(self, ticket: int) -> None:
        """Signal to the other ranks that y of a ticket is complete."""
        self._flags[self._offsets.collected] = ticket

    def has_all(self, ticket: int) -> bool:
        """Return whether y of a ticket is complete."""
        return bool(self._flags[self._offsets.collected] >= ticket)

    def note_arrived(self, rank: int, transfer_id: int, blocks: int) -> None:
        """Publish the number of a transfer's blocks that have arrived on a rank; -1 if the transfer has failed."""
        at = self._offsets.arrived(rank, transfer_id)
        self._flags[at] = -1  # The entry is invalid while it is written.
        self._flags[at + 1] = blocks
        self._flags[at] = transfer_id

    def arrived(self, rank: int, transfer_id: int) -> int:
        """Return the number of a transfer's blocks on a rank: 0 if unknown, -1 if the transfer has failed."""
        at = self._offsets.arrived(rank, transfer_id)
        found = self._flags[at]
        blocks = self._flags[at + 1]
        return blocks if found == transfer_id == self._flags[at] else 0

    def _word(self, at: int) -> NDArray[np.int64]:
        return self._words[at : at + 1]


class _Offsets:
    """Layout of the ring: flags as word indices, x and y as byte offsets."""

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
        """Return the index of a worker's flag for y of a slot.

        The rank itself is worker -1. The times of a ticket share the cache line of its flag, which readers read first.
        """
        return self._y_ready + (slot * (1 + self._shape.workers) + 1 + worker) * _LINE

    def arrived(self, rank: int, transfer_id: int) -> int:
        return self._arrived + (rank * _TRANSFERS + transfer_id % _TRANSFERS) * _LINE

    def descriptor(self, ticket: int) -> int:
        return self._descriptors + ticket % self._shape.descriptors * _LINE

    def cut(self, cut: int) -> int:
        return self._cuts + cut % self._shape.cuts * self._cut_words


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
