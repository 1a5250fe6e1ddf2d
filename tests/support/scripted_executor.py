"""An executor without arithmetic that checks the plans and transfers it is given, on a virtual clock."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from lorikeet.core.clock import VirtualClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart, SequenceStep, StepPlan, StepResult, Tier, Token, Transfer, TransferDone
from lorikeet.costs.transfer_model import LinkDirection, TransferLeg, TransferPath
from lorikeet.worker.links import ModelledTransferLink

_STATE = 1_000_000
"""Offset of the first block of a state, which no KV has."""

Place = tuple[Tier, BlockId]
"""A block of one of the arenas."""


def require(condition: bool, complaint: str) -> None:
    """Refuse a plan that breaks a rule.

    Raises:
        ExecutorError: the condition does not hold.
    """
    if not condition:
        raise ExecutorError(complaint)


class ScriptedArenas:
    """The device's and the host's blocks.

    A block holds KV by offset, ``("weights", digest, index)``, or what nobody may read: ``("in flight", transfer)``,
    from when a transfer begins until it arrives, and for ever if it fails. Contents go where transfers carry them.

    Attributes:
        transfers: those under way, by id.
    """

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        self._contents: dict[Place, object] = {}
        self._writes: set[Place] = set()
        self._reads: Counter[Place] = Counter()
        self._last_id = -1

    def holds(self, block: BlockId, tier: Tier = Tier.DEVICE) -> object:
        """Return what a block holds."""
        return self._contents.get((tier, block))

    def kv(self, block: BlockId, offset: int) -> int | None:
        """Return the KV of a token in a device block, None if there is none."""
        held = self.holds(block)
        return held.get(offset) if isinstance(held, dict) else None

    def write_kv(self, block: BlockId, offset: int, key: int) -> None:
        """Write the KV of a token into a device block.

        Raises:
            ExecutorError: a transfer reads or writes the block.
        """
        place = (Tier.DEVICE, block)
        require(not self._is_busy(place), f"KV is written into block {block}, which is part of a transfer")
        held = self._contents.get(place)
        if offset == 0 or not isinstance(held, dict):
            held = self._contents[place] = {}
        held[offset] = key

    def write_state(self, blocks: Sequence[BlockId], key: int) -> None:
        """Write the state after a token into device blocks.

        Raises:
            ExecutorError: a transfer reads or writes a block.
        """
        for number, block in enumerate(blocks):
            require(not self._is_busy((Tier.DEVICE, block)), f"block {block} gets a state during a transfer")
            self._contents[Tier.DEVICE, block] = {_STATE + number: key}

    def holds_state(self, blocks: Sequence[BlockId], key: int) -> bool:
        """Return whether device blocks hold the state after a token."""
        return all(self.holds(block) == {_STATE + number: key} for number, block in enumerate(blocks))

    def read_host(self, block: BlockId) -> dict[int, int]:
        """Return the KV that a host block holds, by offset.

        Raises:
            ExecutorError: it holds none, or a transfer writes it.
        """
        place = (Tier.HOST, block)
        held = self._contents.get(place)
        require(isinstance(held, dict) and place not in self._writes, f"host block {block} is read and holds no KV")
        assert isinstance(held, dict)
        return held

    def write_host(self, block: BlockId, kv: dict[int, int]) -> None:
        """Write KV that comes from elsewhere into a host block.

        Raises:
            ExecutorError: a transfer reads or writes the block.
        """
        place = (Tier.HOST, block)
        require(not self._is_busy(place), f"host block {block} is written, which is part of a transfer")
        self._contents[place] = kv

    def awaits(self, digest: AdapterDigest) -> bool:
        """Whether an adapter is on its way to the device."""
        coming = (transfer for transfer in self.transfers.values() if transfer.target is Tier.DEVICE)
        return any(transfer.adapter is not None and transfer.adapter.digest == digest for transfer in coming)

    def begin(self, transfer: Transfer) -> None:
        """Check a transfer. Nobody may read what it writes until it has ended.

        Raises:
            ExecutorError: its number or its blocks are not as they must be, or another transfer needs these.
        """
        name, written, read = f"transfer {transfer.transfer_id}", _written(transfer), _read(transfer)
        require(transfer.transfer_id > self._last_id, f"{name} comes after transfer {self._last_id}")
        require(_is_route(transfer), f"the blocks of {name} do not fit its route: {transfer}")
        require(len({*written, *read}) == len(written) + len(read), f"{name} names a block twice: {transfer}")
        for place in written:
            require(not self._is_busy(place), f"{name} writes {place}, which is part of another")
        for place in read:
            require(place not in self._writes, f"{name} reads {place}, which another still writes")
        self._last_id = transfer.transfer_id
        self.transfers[transfer.transfer_id] = transfer
        self._writes.update(written)
        self._reads.update(read)
        self._contents |= dict.fromkeys(written, ("in flight", transfer.transfer_id))

    def end(self, transfer: Transfer, *, fails: bool) -> None:
        """Let its bytes arrive, unless it fails."""
        del self.transfers[transfer.transfer_id]
        written, read = _written(transfer), _read(transfer)
        self._writes.difference_update(written)
        self._reads.subtract(read)
        if fails:
            return
        if transfer.source is Tier.SOURCE:
            assert transfer.adapter is not None
            for places in (_host_places(transfer), _device_places(transfer)):
                for index, place in enumerate(places):
                    self._contents[place] = ("weights", transfer.adapter.digest, index)
        else:
            for place, origin in zip(written, read, strict=True):
                held = self._contents.get(origin)
                self._contents[place] = dict(held) if isinstance(held, dict) else held

    def _is_busy(self, place: Place) -> bool:
        return place in self._writes or self._reads[place] > 0


def _host_places(transfer: Transfer) -> tuple[Place, ...]:
    return tuple((Tier.HOST, block) for block in transfer.host_blocks)


def _device_places(transfer: Transfer) -> tuple[Place, ...]:
    return tuple((Tier.DEVICE, block) for block in transfer.device_blocks)


def _written(transfer: Transfer) -> tuple[Place, ...]:
    """Return the blocks whose contents a transfer replaces."""
    if transfer.source is Tier.SOURCE:
        return _host_places(transfer) + _device_places(transfer)
    return _device_places(transfer)[transfer.kept :] if transfer.target is Tier.DEVICE else _host_places(transfer)


def _read(transfer: Transfer) -> tuple[Place, ...]:
    """Return the blocks that a transfer reads, in the order of those that it writes."""
    if transfer.source is Tier.SOURCE:
        return ()
    return _host_places(transfer)[transfer.kept :] if transfer.source is Tier.HOST else _device_places(transfer)


def _is_route(transfer: Transfer) -> bool:
    """Whether such transfers exist, with blocks on both sides where they have to be."""
    host, device, is_adapter = len(transfer.host_blocks), len(transfer.device_blocks), transfer.adapter is not None
    match transfer.source, transfer.target:
        case Tier.SOURCE, Tier.HOST:
            return is_adapter and host > 0 and device == 0
        case Tier.SOURCE, Tier.DEVICE:
            return is_adapter and device > 0 and host in (0, device)
        case Tier.HOST, Tier.DEVICE:
            return host == device > transfer.kept
        case Tier.DEVICE, Tier.HOST:
            return host == device > 0 and not is_adapter
    return False


TokenScript = Callable[[SequenceStart, int], int]
"""(the sequence, position of the new token) → token id."""


def token_by_seed(start: SequenceStart, position: int) -> int:
    """Return a token id that is a function of (seed, position), in 0..999."""
    return (start.sampling.seed * 1_000_003 + position * 7_919 + 12_345) % 1000


@dataclass
class _Sequence:
    start: SequenceStart
    token_ids: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    state: tuple[BlockId, ...] = ()
    save: tuple[BlockId, ...] = ()
    save_at: int = 0
    _keys: list[int] = field(default_factory=list)

    def key(self, position: int) -> int:
        """Stand for the KV of a token: it depends on every token up to it, and from its start on on the adapter."""
        while len(self._keys) <= position:
            before: object = self._keys[-1] if self._keys else None
            if len(self._keys) == self.start.adapter_start and self.start.adapter is not None:
                before = before, self.start.adapter
            self._keys.append(hash((before, self.token_ids[len(self._keys)])))
        return self._keys[position]


class ScriptedExecutor:
    """Checks plans and transfers instead of computing. Times are virtual; :class:`ModelledTransferLink` runs transfers.

    Args:
        clock: is advanced by every step.
        block_size: tokens of KV in a block.
        script: gives the tokens.
        step_s: time of a step, whatever it holds.
        token_s: time by which each token of a step lengthens it.
        load_s: time to read an adapter's files.
        copy_s: time to copy a block between the tiers.
        switch_s: time to change the merged adapter.
        failing: versions that cannot be read.
        fails: whether a transfer fails for another reason.
        sick: requests whose logits are not finite.
    """

    def __init__(
        self,
        clock: VirtualClock,
        block_size: int,
        script: TokenScript = token_by_seed,
        step_s: float = 0.01,
        token_s: float = 0.0,
        load_s: float = 0.05,
        copy_s: float = 0.001,
        switch_s: float = 0.0,
        failing: Collection[AdapterDigest] = (),
        fails: Callable[[Transfer], bool] = lambda transfer: False,
        sick: Collection[RequestId] = (),
    ) -> None:
        self._clock = clock
        self._block_tokens = block_size
        self._script = script
        self._step_s = step_s
        self._token_s = token_s
        self._load_s = load_s
        self._copy_s = copy_s
        self._switch_s = switch_s
        self._merged: AdapterDigest | None = None
        self._failing = failing
        self._fails = fails
        self._sick = sick
        self._running: dict[RequestId, int] = {}
        self._sequences: dict[RequestId, _Sequence] = {}
        self._weights: dict[AdapterDigest, tuple[BlockId, ...]] = {}
        self._arenas = ScriptedArenas()
        self._link = ModelledTransferLink(self._course)

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan, write its tokens into the blocks and give the next ones by the script."""
        started_s = self._clock.now()
        self._end_step_under_way(plan)
        for request_id in plan.drops:
            del self._sequences[request_id]
        for digest in plan.evictions:
            require(not self._arenas.awaits(digest), f"{digest} is evicted, but still on its way")
            self._weights.pop(digest, None)
        for start in plan.starts:
            require(start.request_id not in self._sequences, f"{start.request_id} is started twice")
            self._sequences[start.request_id] = _Sequence(start, list(start.token_ids))
        for transfer_id in plan.urgent:
            require(transfer_id in self._arenas.transfers, f"transfer {transfer_id} is urgent, but not under way")
        self._link.promote(plan.urgent, started_s)
        for transfer in plan.transfers:
            self._arenas.begin(transfer)
            self._link.begin(transfer, started_s)
        self._check_assisted(plan)
        switch_s = self._switch(plan)
        steps_run = 1 if plan.overlapped else self._steps_until_stop(plan)
        tokens = tuple(self._run(step, steps_run, plan) for step in plan.sequences)
        if plan.sequences:
            computed_s = self._token_s * sum(step.tokens for step in plan.sequences)
            self._clock.advance((self._step_s + computed_s) * steps_run + switch_s)
        sick = [step.request_id for step in plan.sequences if step.samples and step.request_id in self._sick]
        failed = dict.fromkeys(sick, "the model's output is not finite")
        next_runs = plan.overlapped and plan.repeat > 1
        self._running = {step.request_id: step.start + 1 for step in plan.sequences} if next_runs else {}
        return StepResult(plan.step, tokens, steps_run, self._clock.now() - started_s, failed, switch_s, next_runs)

    def assist_counters(self) -> None:
        """Return nothing: there are no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers whose time has come; what they bring is there now."""
        return [self._end(done) for done in self._link.take_done(self._clock.now())]

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Advance the clock to the end of the next transfer, or by ``timeout_s``.

        Raises:
            ExecutorError: neither will ever come.
        """
        limits = (self._link.next_s(), None if timeout_s is None else self._clock.now() + timeout_s)
        due = [when_s for when_s in limits if when_s is not None]
        require(bool(due), "a transfer is awaited, and none is under way")
        self._clock.wait_until(min(due))

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return the KV of host blocks by offset."""
        return tuple(msgspec.msgpack.encode(self._arenas.read_host(block)) for block in blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Write the KV of host blocks."""
        for block, content in zip(blocks, contents, strict=True):
            self._arenas.write_host(block, msgspec.msgpack.decode(content, type=dict[int, int]))

    def close(self) -> None:
        """Nothing is held."""

    def _course(self, transfer: Transfer) -> TransferPath:
        copied_s = self._copy_s * (len(transfer.device_blocks) - transfer.kept)
        if transfer.source is Tier.DEVICE:
            return TransferPath((TransferLeg(LinkDirection.OUT, copied_s),))
        if transfer.source is Tier.HOST:
            return TransferPath((TransferLeg(LinkDirection.IN, copied_s),))
        read = TransferLeg(LinkDirection.READ, self._load_s)
        by_host = transfer.target is Tier.DEVICE and transfer.host_blocks
        return TransferPath((read, TransferLeg(LinkDirection.IN, copied_s)) if by_host else (read,))

    def _end(self, done: TransferDone) -> TransferDone:
        transfer = self._arenas.transfers[done.transfer_id]
        unreadable = transfer.adapter is not None and transfer.adapter.digest in self._failing
        fails = (transfer.source is Tier.SOURCE and unreadable) or self._fails(transfer)
        self._arenas.end(transfer, fails=fails)
        if fails:
            return TransferDone(done.transfer_id, "scripted failure", done.duration_s)
        if transfer.adapter is not None and transfer.target is Tier.DEVICE:
            self._weights[transfer.adapter.digest] = transfer.device_blocks
        return done

    def _end_step_under_way(self, plan: StepPlan) -> None:
        """Write what it computes, as late as it may; and see to it that a plan goes on with nothing else."""
        for request_id, position in self._running.items():
            sequence = self._sequences[request_id]
            if position < len(sequence.token_ids):
                self._arenas.write_kv(*self._place(sequence, position), sequence.key(position))
        if plan.continues:
            steps = {step.request_id: step.start for step in plan.sequences if step.tokens == 1 and not step.new_blocks}
            is_that = len(steps) == len(plan.sequences) > 0 and steps.items() <= self._running.items()
            require(is_that, f"step {plan.step} goes on with {steps}, but {self._running} is under way")
            may_repeat = plan.repeat == 1 or len(steps) == len(self._running)
            require(may_repeat, f"step {plan.step} is repeated, though sequences have left")
            once = plan.starts or plan.drops or plan.transfers or plan.evictions
            require(not once, f"step {plan.step} runs already, and changes something")

    def _steps_until_stop(self, plan: StepPlan) -> int:
        """Return how many of the identical steps run before one of the sequences stops."""
        for ran in range(1, plan.repeat):
            for step in plan.sequences:
                start = self._sequences[step.request_id].start
                if self._script(start, step.start + ran) in start.sampling.stop_token_ids:
                    return ran
        return plan.repeat

    def _check_assisted(self, plan: StepPlan) -> None:
        """See to it that whoever is assisted prefills, under an adapter that is on its way from the host."""
        coming = {t.adapter.digest: t for t in self._arenas.transfers.values() if t.adapter and t.groups}
        for digest in plan.assisted:
            require(digest in coming, f"{digest} is assisted, but not on its way from the host")
            for index, block in enumerate(coming[digest].host_blocks):
                intact = self._arenas.holds(block, Tier.HOST) == ("weights", digest, index)
                require(intact, f"host block {block} does not hold adapter {digest}, which is assisted")
        for step in plan.sequences:
            sequence = self._sequences[step.request_id]
            prefills = step.start < len(sequence.start.token_ids)
            assisted = sequence.start.adapter in plan.assisted
            require(prefills or not assisted, f"{step.request_id} decodes, assisted")

    def _switch(self, plan: StepPlan) -> float:
        """Take the plan's merged adapter in; return how long that takes."""
        if not plan.sequences:
            require(plan.merged == self._merged, f"step {plan.step} runs nobody, and changes the merged adapter")
            return 0.0
        for step in plan.sequences:
            start = self._sequences[step.request_id].start
            own = plan.merged is None or (plan.merged == start.adapter and not start.adapter_start)
            require(own, f"{step.request_id} runs while adapter {plan.merged} is merged")
        if plan.merged == self._merged:
            return 0.0
        self._merged = plan.merged
        if plan.merged is not None:
            self._check_weights(plan.merged, f"step {plan.step}")
        return self._switch_s

    def _check_weights(self, digest: AdapterDigest, reader: str) -> None:
        require(digest in self._weights, f"{reader}: adapter {digest} is not loaded")
        for index, block in enumerate(self._weights[digest]):
            intact = self._arenas.holds(block) == ("weights", digest, index)
            require(intact, f"{reader}: block {block} no longer holds adapter {digest}")

    def _run(self, step: SequenceStep, steps_run: int, plan: StepPlan) -> tuple[Token, ...]:
        sequence = self._sequences[step.request_id]
        digest = sequence.start.adapter
        sequence.blocks += step.new_blocks
        if digest is not None and digest not in plan.assisted:
            self._check_weights(digest, step.request_id)
        for position in range(step.start):
            block, offset = self._place(sequence, position)
            own = self._arenas.kv(block, offset) == sequence.key(position)
            require(own, f"{step.request_id}: block {block} holds other KV than token {position}'s")
        self._begin_state(sequence, step)
        tokens = []
        for ran in range(steps_run):
            self._advance_state(sequence, step.start + ran + step.known_tokens)
            for position in range(step.start + ran, step.start + ran + step.known_tokens):
                self._arenas.write_kv(*self._place(sequence, position), sequence.key(position))
            if step.samples and step.request_id not in self._sick:
                tokens += self._sample(sequence, step, step.start + step.known_tokens + ran)
        return tuple(tokens)

    def _begin_state(self, sequence: _Sequence, step: SequenceStep) -> None:
        """Load a snapshot, and see to it that the state is that after the tokens before the step."""
        if step.state is not None:
            sequence.state = step.state.blocks or sequence.state
            if step.state.save:
                sequence.save, sequence.save_at = step.state.save, step.state.save_at
            if step.state.load:
                own = self._arenas.holds_state(step.state.load, sequence.key(step.start - 1))
                require(own, f"{step.request_id}: the snapshot is not the state after {step.start} tokens")
                self._arenas.write_state(sequence.state, sequence.key(step.start - 1))
        if sequence.state and step.start:
            own = self._arenas.holds_state(sequence.state, sequence.key(step.start - 1))
            require(own, f"{step.request_id}: its state is not that after {step.start} tokens")

    def _advance_state(self, sequence: _Sequence, tokens: int) -> None:
        """Update the state, and copy it where that was ordered."""
        if sequence.state:
            self._arenas.write_state(sequence.state, sequence.key(tokens - 1))
            if sequence.save and tokens == sequence.save_at:
                self._arenas.write_state(sequence.save, sequence.key(tokens - 1))
                sequence.save = ()

    def _sample(self, sequence: _Sequence, step: SequenceStep, position: int) -> list[Token]:
        """Return the token at a position, and those after it as far as the draft is right; it writes KV of all."""
        require(position == len(sequence.token_ids) or not step.draft, f"{step.request_id} drafts, but does not decode")
        for at in range(len(step.draft)):
            self._arenas.write_kv(*self._place(sequence, position + at), -1)
        tokens = []
        for at in range(len(step.draft) + 1):
            token = Token(self._script(sequence.start, position + at))
            sequence.token_ids.append(token.token_id)
            tokens.append(token)
            if at == len(step.draft) or step.draft[at] != token.token_id:
                break
            self._arenas.write_kv(*self._place(sequence, position + at), sequence.key(position + at))
        return tokens

    def _place(self, sequence: _Sequence, position: int) -> tuple[BlockId, int]:
        return sequence.blocks[position // self._block_tokens], position % self._block_tokens
