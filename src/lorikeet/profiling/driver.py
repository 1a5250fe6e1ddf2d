"""Drives an executor directly, with repeated steps of any shape on memory that has been written before."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import Executor
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import KernelForm, SequenceStart, SequenceStep, StateStep, StepPlan, Tier, Transfer
from lorikeet.core.request import SamplingParams
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.model import SequenceWork
from lorikeet.memory.packing import pack

SLACK_TOKENS = 16
"""KV capacity in tokens after each sequence, for repeated decodes."""

_NEVER_S = 3600.0
_SEED = 7


class ExecutorDriverError(RuntimeError):
    """A measurement cannot be made on this machine. The message names the reason."""


class StepTiming(NamedTuple):
    """One measurement.

    Attributes:
        seconds: time of one step.
        steps: number of steps that ran in the plan.
    """

    seconds: float
    steps: int


class ExecutorDriver:
    """Runs prepared steps without a scheduler.

    A step can be repeated, because it always computes the same positions.

    All prepared steps share the same scattered KV blocks. The content of the blocks does not matter, but they must have
    been written: all untouched pages share one zero page, which stays in the CPU cache.

    Args:
        executor: executor that runs the steps. No other caller may drive it at the same time.
        sizes: the executor's sizes.
        vocabulary: number of token ids.
        kv_tokens: KV capacity for one step, limited to half of the memory.
    """

    def __init__(self, executor: Executor, sizes: EngineSizes, vocabulary: int, kv_tokens: int) -> None:
        self.sizes = sizes
        self._executor = executor
        generator = random.Random(_SEED)
        blocks = [BlockId(block) for block in range(sizes.total_blocks)]
        generator.shuffle(blocks)
        kv_blocks = min(-(-kv_tokens // sizes.block_size), len(blocks) // 2)
        self._kv_blocks = blocks[:kv_blocks]
        self._free = blocks[kv_blocks:]
        self._host_blocks = [BlockId(block) for block in range(sizes.host_blocks)]
        generator.shuffle(self._host_blocks)
        self._order = generator
        self._token_ids = generator.choices(range(vocabulary), k=sizes.max_model_len)
        self._loaded: dict[AdapterDigest, tuple[BlockId, ...]] = {}
        self._started: list[RequestId] = []
        self._transfers = 0

    @property
    def most_copied_blocks(self) -> int:
        """Largest number of blocks in a copy."""
        return min(len(self._kv_blocks), len(self._host_blocks))

    @property
    def kv_tokens(self) -> int:
        """KV capacity for one step, in tokens."""
        return len(self._kv_blocks) * self.sizes.block_size

    def prepare(self, sequences: Sequence[SequenceWork]) -> tuple[SequenceStep, ...]:
        """Start the sequences of a step. Their adapters are named by digest.

        Raises:
            ExecutorDriverError: the KV capacity is too small.
        """
        free = list(reversed(self._kv_blocks))
        starts = []
        blocks = []
        states: list[StateStep | None] = []
        state_blocks = self.sizes.local_geometry.state_blocks(self.sizes.block_size)
        for number, work in enumerate(sequences, len(self._started)):
            needed = -(-(work.start + work.tokens + SLACK_TOKENS) // self.sizes.block_size)
            if needed + state_blocks > len(free):
                raise ExecutorDriverError(f"the KV of a step does not fit into {self.kv_tokens} tokens")
            blocks.append(tuple(free.pop() for _ in range(needed)))
            of_state = tuple(free.pop() for _ in range(state_blocks))
            states.append(StateStep(of_state) if of_state else None)
            known = work.start + work.tokens
            sampling = SamplingParams(max_tokens=self.sizes.max_model_len, temperature=0.0)
            adapter = None if work.adapter is None else AdapterDigest(str(work.adapter))
            name = RequestId(f"profile-{number}")
            starts.append(SequenceStart(name, self._token_ids[:known], known, sampling, adapter))
        self._started += [start.request_id for start in starts]
        first = [
            SequenceStep(start.request_id, work.start, work.tokens, new, work.samples, state=state)
            for start, work, new, state in zip(starts, sequences, blocks, states, strict=True)
        ]
        self._executor.execute(StepPlan(0, sequences=tuple(first), starts=tuple(starts)))
        return tuple(msgspec.structs.replace(step, new_blocks=(), state=None) for step in first)

    def run(
        self,
        steps: tuple[SequenceStep, ...],
        form: KernelForm = KernelForm.UNPADDED,
        repeat: int = 1,
        limit_s: float = _NEVER_S,
    ) -> StepTiming:
        """Run a prepared step, or decodes several times, and return the time of one step.

        Args:
            steps: steps that :meth:`prepare` returned.
            form: kernel form for mixed ranks.
            repeat: number of steps, at most ``SLACK_TOKENS``.
            limit_s: seconds after which no further step begins.
        """
        plan = StepPlan(0, sequences=steps, kernel_form=form, repeat=repeat, max_duration_s=limit_s)
        result = self._executor.execute(plan)
        return StepTiming(result.duration_s / result.steps_run, result.steps_run)

    def switch(self, steps: tuple[SequenceStep, ...], merged: AdapterDigest | None) -> float:
        """Run a prepared step with a merged adapter, or without one, and return the seconds of the switch.

        Args:
            steps: steps of the merged adapter alone, or any steps if none is merged. ``run`` merges no adapter.
            merged: a loaded adapter.
        """
        return self._executor.execute(StepPlan(0, sequences=steps, merged=merged)).switch_s

    def load(self, ref: AdapterRef) -> float:
        """Load an adapter into device blocks and return the seconds of the load.

        Raises:
            ExecutorDriverError: too few blocks are free, or the load failed.
        """
        count = self._blocks_of(ref)
        if count > len(self._free):
            raise ExecutorDriverError(
                f"adapter {ref.name!r} needs {count} blocks, and {len(self._free)} are free: allow more memory"
            )
        self._loaded[ref.digest] = tuple(self._free.pop() for _ in range(count))
        return self._transfer(Tier.SOURCE, Tier.DEVICE, device=self._loaded[ref.digest], adapter=ref)

    def read_to_host(self, ref: AdapterRef) -> float:
        """Read an adapter into host blocks, overwriting them, and return the seconds of the read.

        Raises:
            ExecutorDriverError: there are too few blocks, or the read failed.
        """
        return self._transfer(Tier.SOURCE, Tier.HOST, host=self._some_host_blocks(self._blocks_of(ref)), adapter=ref)

    def copy(self, target: Tier, count: int) -> float:
        """Copy scattered blocks from the other tier to ``target`` and return the seconds of the copy.

        Raises:
            ExecutorDriverError: a tier has fewer blocks, or the copy failed.
        """
        if count > self.most_copied_blocks:
            raise ExecutorDriverError(f"{count} blocks are more than the {self.most_copied_blocks} of the largest copy")
        device = tuple(self._order.sample(self._kv_blocks, count))
        host = self._some_host_blocks(count)
        return self._transfer(Tier.HOST if target is Tier.DEVICE else Tier.DEVICE, target, host=host, device=device)

    def evict(self, digest: AdapterDigest) -> None:
        """Free an adapter's blocks."""
        self._executor.execute(StepPlan(0, evictions=(digest,)))
        self._free.extend(self._loaded.pop(digest))

    def write_kv(self, ref: AdapterRef) -> None:
        """Write all KV blocks by loading an adapter repeatedly, which is much faster than a prefill.

        Raises:
            ExecutorDriverError: the KV blocks cannot hold the adapter.
        """
        count = self._blocks_of(ref)
        if count > len(self._kv_blocks):
            raise ExecutorDriverError(
                f"adapter {ref.name!r} needs {count} blocks, and {len(self._kv_blocks)} are reserved for KV"
            )
        for first in range(0, len(self._kv_blocks), count):
            last = min(first + count, len(self._kv_blocks))
            blocks = tuple(self._kv_blocks[last - count : last])
            self._transfer(Tier.SOURCE, Tier.DEVICE, device=blocks, adapter=ref)
        self._executor.execute(StepPlan(0, evictions=(ref.digest,)))

    def write_host(self) -> None:
        """Write all host blocks.

        Raises:
            ExecutorDriverError: the host tier has no blocks.
        """
        most = self.most_copied_blocks
        if not most:
            raise ExecutorDriverError("the host tier has no blocks to copy to: allow host memory")
        for first in range(0, len(self._host_blocks), most):
            blocks = tuple(self._host_blocks[first : first + most])
            self._transfer(Tier.DEVICE, Tier.HOST, host=blocks, device=tuple(self._kv_blocks[: len(blocks)]))

    def clear(self) -> None:
        """Remove all sequences and adapters from the executor, so that another driver can use it."""
        self._executor.execute(StepPlan(0, drops=tuple(self._started), evictions=tuple(self._loaded)))
        for blocks in self._loaded.values():
            self._free.extend(blocks)
        self._loaded = {}
        self._started = []

    def _blocks_of(self, ref: AdapterRef) -> int:
        geometry = self.sizes.local_geometry
        return pack(ref.ranks, geometry, geometry.block_elements(self.sizes.block_size), ref.extras).blocks

    def _some_host_blocks(self, count: int) -> tuple[BlockId, ...]:
        if count > len(self._host_blocks):
            raise ExecutorDriverError(
                f"{count} host blocks are needed, and there are {len(self._host_blocks)}: allow more host memory"
            )
        return tuple(self._order.sample(self._host_blocks, count))

    def _transfer(
        self,
        source: Tier,
        target: Tier,
        host: tuple[BlockId, ...] = (),
        device: tuple[BlockId, ...] = (),
        adapter: AdapterRef | None = None,
    ) -> float:
        self._transfers += 1
        transfer = Transfer(self._transfers, source, target, host, device, adapter)
        self._executor.execute(StepPlan(0, transfers=(transfer,)))
        while not (done := self._executor.completed_transfers()):
            self._executor.wait_for_transfer(None)
        if done[0].error is not None:
            raise ExecutorDriverError(done[0].error)
        return done[0].duration_s
