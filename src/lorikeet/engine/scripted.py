"""An executor without arithmetic that checks the plans it is given, on a virtual clock.

It remembers what every block holds and refuses a plan that would read anything but the sequence's own
tokens under its own adapter version, or weights that are not there. So every engine test on it is also
a test that no plan can mix tenants.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from lorikeet.core.clock import VirtualClock
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import AdapterLoad, AdapterLoadDone, SequenceStart, SequenceStep, StepPlan, StepResult, Token
from lorikeet.engine.executor import ExecutorError

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
    _keys: list[int] = field(default_factory=list)

    def key(self, position: int) -> int:
        """Stand for the KV of a token: it depends on the adapter and on every token up to it."""
        while len(self._keys) <= position:
            before = self._keys[-1] if self._keys else self.start.adapter
            self._keys.append(hash((before, self.token_ids[len(self._keys)])))
        return self._keys[position]


class ScriptedExecutor:
    """See the module. Times are virtual seconds.

    Args:
        clock: is advanced by every step.
        block_tokens: tokens of KV in a block.
        script: gives the tokens.
        step_s: time of a step, whatever it holds.
        load_s: time of a load.
        failing: versions whose load fails.
        sick: requests whose output is not finite.
    """

    def __init__(
        self,
        clock: VirtualClock,
        block_tokens: int,
        script: TokenScript = token_by_seed,
        step_s: float = 0.01,
        load_s: float = 0.05,
        failing: frozenset[AdapterDigest] = frozenset(),
        sick: frozenset[RequestId] = frozenset(),
    ) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._script = script
        self._step_s = step_s
        self._load_s = load_s
        self._failing = failing
        self._sick = sick
        self._sequences: dict[RequestId, _Sequence] = {}
        self._contents: dict[BlockId, object] = {}
        self._weights: dict[AdapterDigest, AdapterLoad] = {}
        self._loads: list[tuple[float, int, AdapterLoad]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan, write its tokens into the blocks and give the next ones by the script."""
        started_s = self._clock.now()
        for request_id in plan.drops:
            del self._sequences[request_id]
        for digest in plan.evictions:
            self._weights.pop(digest, None)
        for start in plan.starts:
            self._require(start.request_id not in self._sequences, f"{start.request_id} is started twice")
            self._sequences[start.request_id] = _Sequence(start, list(start.token_ids))
        for load in plan.loads:
            for block in load.blocks:
                self._contents[block] = ("in flight", load.generation)
            heapq.heappush(self._loads, (self._clock.now() + self._load_s, load.generation, load))
        steps_run = self._steps_until_stop(plan)
        tokens = tuple(self._run(step, steps_run) for step in plan.sequences)
        if plan.sequences:
            self._clock.advance(self._step_s * steps_run)
        failed = tuple(step.request_id for step in plan.sequences if step.samples and step.request_id in self._sick)
        return StepResult(plan.step, tokens, steps_run, self._clock.now() - started_s, failed)

    def completed_loads(self) -> list[AdapterLoadDone]:
        """Return the loads whose time has come."""
        done = []
        while self._loads and self._loads[0][0] <= self._clock.now():
            _, generation, load = heapq.heappop(self._loads)
            digest = load.adapter.digest
            if digest in self._failing:
                done.append(AdapterLoadDone(digest, generation, "scripted failure"))
                continue
            for index, block in enumerate(load.blocks):
                self._contents[block] = (digest, generation, index)
            self._weights[digest] = load
            done.append(AdapterLoadDone(digest, generation))
        return done

    def wait_for_load(self, timeout_s: float | None) -> None:
        """Advance the clock to the end of the next load, or by ``timeout_s``."""
        latest = None if timeout_s is None else self._clock.now() + timeout_s
        if self._loads:
            due = self._loads[0][0]
            self._clock.wait_until(due if latest is None else min(due, latest))
        elif latest is not None:
            self._clock.wait_until(latest)

    def close(self) -> None:
        """Nothing is held."""

    def _require(self, condition: bool, complaint: str) -> None:
        if not condition:
            raise ExecutorError(complaint)

    def _steps_until_stop(self, plan: StepPlan) -> int:
        """Return how many of the identical steps run before one of the sequences stops."""
        for ran in range(1, plan.repeat):
            for step in plan.sequences:
                start = self._sequences[step.request_id].start
                if self._script(start, step.start + ran) in start.sampling.stop_token_ids:
                    return ran
        return plan.repeat

    def _run(self, step: SequenceStep, steps_run: int) -> tuple[Token, ...]:
        sequence = self._sequences[step.request_id]
        digest = sequence.start.adapter
        sequence.blocks += step.new_blocks
        if digest is not None:
            self._require(digest in self._weights, f"{step.request_id}: adapter {digest} is not loaded")
            load = self._weights[digest]
            for index, block in enumerate(load.blocks):
                intact = self._contents.get(block) == (digest, load.generation, index)
                self._require(intact, f"{step.request_id}: block {block} no longer holds adapter {digest}")
        for position in range(step.start):
            block, found = self._at(sequence, position)
            own = found == sequence.key(position)
            self._require(own, f"{step.request_id}: block {block} holds other KV than token {position}'s")
        tokens = []
        for ran in range(steps_run):
            for position in range(step.start + ran, step.start + ran + step.tokens):
                self._store(sequence, position)
            if step.samples and step.request_id not in self._sick:
                token = Token(self._script(sequence.start, step.start + step.tokens + ran))
                sequence.token_ids.append(token.token_id)
                tokens.append(token)
        return tuple(tokens)

    def _at(self, sequence: _Sequence, position: int) -> tuple[BlockId, object]:
        block = sequence.blocks[position // self._block_tokens]
        held = self._contents.get(block)
        return block, held.get(position % self._block_tokens) if isinstance(held, dict) else None

    def _store(self, sequence: _Sequence, position: int) -> None:
        block = sequence.blocks[position // self._block_tokens]
        offset = position % self._block_tokens
        held = self._contents.get(block)
        if offset == 0 or not isinstance(held, dict):
            held = self._contents[block] = {}
        held[offset] = sequence.key(position)
