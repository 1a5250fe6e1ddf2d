"""Executors without arithmetic: a cost model says how long steps and transfers take.

The modelled executor runs on a virtual clock, the paced one in real time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from lorikeet.config import ConfigError, EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.assist_costs import AssistCosts
from lorikeet.core.clock import VirtualClock, WaitableClock
from lorikeet.core.executor import EngineSizes, ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Tier, Token, Transfer, TransferDone
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.cold_prefill import ColdAdapter, assist_costs, layer_arrivals_s, prefill_s
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.transfers import MergeModel, TransferModel
from lorikeet.models.config import read_model_config
from lorikeet.presets import Preset
from lorikeet.worker.links import ModelledTransferLink, TransferLink

GroupEnds = Callable[[int], Sequence[float]]
"""When each group of a transfer under way ends, by its id, in seconds from the plan's begin."""


class Times(NamedTuple):
    """How long a plan takes.

    Attributes:
        steps: that run; 0 of a plan without sequences, else at least one.
        seconds: of the steps, and of the switch before them.
        loop_s: that the engine's loop takes after them.
        switch_s: of ``seconds``, until another adapter was merged.
        next_runs: whether the next of the plan's steps runs by then.
    """

    steps: int
    seconds: float
    loop_s: float
    switch_s: float = 0.0
    next_runs: bool = False


class PlanTimes(Protocol):
    """How long plans take."""

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> Times:
        """Return how many of a plan's identical steps run until ``limit_s`` is over, and the seconds they take."""
        ...


class TokenChoice(Protocol):
    """Which tokens come out."""

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...] | None:
        """Return ``count`` tokens from ``position`` on; None if the output is not finite."""
        ...


class SeededTokens:
    """Ordinary tokens as a function of (seed, position).

    They pass over a request's stop tokens, so that an answer has the length that it asks for.

    Args:
        low, high: the token ids to choose from, both included.
    """

    def __init__(self, low: int, high: int) -> None:
        self._tokens = [Token(token_id) for token_id in range(low, high + 1)]
        # Every answer goes round the same circle of tokens from a place of its own.
        self._circle = tuple(self._tokens[at * 7_919 % len(self._tokens)] for at in range(len(self._tokens)))

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...]:
        """See ``TokenChoice``."""
        circle, stops = self._circle, start.sampling.stop_token_ids
        first = (start.sampling.seed * 1_000_003 + 12_345 + position) % len(circle)
        chosen = circle[first : first + count]
        while len(chosen) < count:
            chosen += circle[: count - len(chosen)]
        return tuple(self._after(token, stops) for token in chosen) if stops else chosen

    def _after(self, token: Token, stops: tuple[int, ...]) -> Token:
        index = token.token_id - self._tokens[0].token_id
        while self._tokens[index % len(self._tokens)].token_id in stops:
            index += 1
        return self._tokens[index % len(self._tokens)]


class ModelledExecutor:
    """See the module. Transfers go on beside the steps.

    Args:
        clock: virtual or real.
        times: of plans.
        link: of the transfers.
        choice: of the tokens.
        catch_up_s: how late, on a real clock, a step may begin and count as beginning with the last one's end.
        coalesced: whether repeats stand for single steps, so that one ends when a transfer does and the engine may
            decide anew. Live repeats do not look at transfers.
    """

    def __init__(
        self,
        clock: WaitableClock,
        times: PlanTimes,
        link: TransferLink,
        choice: TokenChoice,
        catch_up_s: float = 0.0,
        *,
        coalesced: bool = False,
    ) -> None:
        self._clock = clock
        self._times = times
        self._link = link
        self._choice = choice
        self._catch_up_s = catch_up_s
        self._coalesced = coalesced
        self._starts: dict[RequestId, SequenceStart] = {}
        self._ended_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the time of a plan pass."""
        for request_id in plan.drops:
            del self._starts[request_id]
        for start in plan.starts:
            self._starts[start.request_id] = start
        now = self._clock.now()
        if plan.urgent:
            self._link.promote(plan.urgent, now)
        for transfer in plan.transfers:
            self._link.begin(transfer, now)
        limit_s = plan.max_duration_s
        if self._coalesced and (next_end_s := self._link.next_s()) is not None:
            limit_s = min(limit_s, next_end_s - now)
        times = self._times.steps_s(plan, limit_s, partial(self._group_ends_s, now))
        if plan.sequences:
            began_s = self._ended_s if now - self._ended_s < self._catch_up_s else now
            self._ended_s = began_s + times.seconds + times.loop_s
            self._clock.wait_until(self._ended_s)
        chosen = [
            self._choice.tokens(self._starts[step.request_id], step.start + step.tokens, times.steps)
            if step.samples
            else ()
            for step in plan.sequences
        ]
        failed = tuple(step.request_id for step, tokens in zip(plan.sequences, chosen, strict=True) if tokens is None)
        given = tuple(tokens or () for tokens in chosen)
        return StepResult(plan.step, given, times.steps, times.seconds, failed, times.switch_s, times.next_runs)

    def assist_counters(self) -> None:
        """Return nothing: there are no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers whose time has come."""
        return self._link.take_done(self._clock.now())

    def next_transfer_s(self) -> float | None:
        """Return when the next transfer ends, as things stand; None if none is under way."""
        return self._link.next_s()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Wait until the next transfer has ended, or for ``timeout_s``.

        Raises:
            ExecutorError: neither will ever come.
        """
        next_end_s = self._link.next_s()
        due = [] if next_end_s is None else [next_end_s]
        if timeout_s is not None:
            due.append(self._clock.now() + timeout_s)
        if not due:
            raise ExecutorError("a transfer is awaited, and none is under way")
        self._clock.wait_until(min(due))

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """See ``Executor``: blocks hold nothing here."""
        return (b"",) * len(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """See ``Executor``."""

    def close(self) -> None:
        """Nothing is held."""

    def _group_ends_s(self, now: float, transfer_id: int) -> list[float]:
        return [end_s - now for end_s in self._link.group_ends_s(transfer_id, now)]


_NOBODY: frozenset[object] = frozenset()


class ModelledTimes:
    """Times by a cost model.

    Steps on merged weights cost what the base model does. A plan with another adapter merged than the last one takes
    the time of the switch first. See ``costs.assisted`` for plans whose prefills the host assists. Of a plan
    that is overlapped one step runs, and the loop has the time of the next one.

    Args:
        transfers: what moves cost; its profile has the constants.
        preset: of the replica.
        loop_each_step: whether a repeat stands for as many turns of the engine's loop, or is one turn of it.
    """

    def __init__(self, transfers: TransferModel, preset: Preset, *, loop_each_step: bool) -> None:
        profile = transfers.profile
        self._transfers = transfers
        self._assist = assist_costs(transfers, preset)
        self._model = CostModel(profile, preset.kernel_form)
        self._merging = MergeModel(profile, preset.merge_by, transfers)
        self._loop_each_step = loop_each_step
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._ranks: dict[AdapterDigest, float] = {}
        self._last_moves: dict[AdapterDigest, Transfer] = {}
        self._adapters: dict[RequestId, AdapterDigest | None] = {}
        self._merged: AdapterRef | None = None

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> Times:
        """See ``PlanTimes``.

        Raises:
            ProfileError: the profile lacks something that the plan needs.
        """
        self.note(plan)
        if not plan.sequences:
            return Times(0, 0.0, 0.0)
        switch_s = self._switch_s(plan)
        loop_s = self._model.loop_s(len(plan.sequences))
        if plan.assisted:
            return Times(1, switch_s + self._assisted_s(plan, group_ends_s), loop_s, switch_s)
        work = step_work(self._work(plan), plan.kernel_form)
        step_s, growth_s = self._model.step_s(work), self._model.growth_s(work)
        if plan.overlapped:
            next_runs = plan.repeat > 1
            step_s = max(step_s, loop_s) if plan.continues else step_s
            return Times(1, switch_s + step_s, 0.0 if next_runs else loop_s, switch_s, next_runs)
        between_s = loop_s if self._loop_each_step else 0.0
        ran, seconds = 1, switch_s + step_s
        while ran < plan.repeat and seconds + ran * between_s < limit_s:
            step_s += growth_s
            seconds += step_s
            ran += 1
        return Times(ran, seconds, loop_s + (ran - 1) * between_s, switch_s)

    def note(self, plan: StepPlan) -> None:
        """Take in who comes and goes with a plan."""
        for digest in plan.evictions:
            self._ranks.pop(digest, None)
            self._refs.pop(digest, None)
            self._last_moves.pop(digest, None)
        for transfer in plan.transfers:
            ref = transfer.adapter
            if ref is not None and transfer.target is Tier.DEVICE:
                self._refs[ref.digest] = ref
                self._ranks[ref.digest] = self._model.adapter_rank(ref)
                self._last_moves[ref.digest] = transfer
        for request_id in plan.drops:
            del self._adapters[request_id]
        for start in plan.starts:
            self._adapters[start.request_id] = start.adapter

    def _switch_s(self, plan: StepPlan) -> float:
        """Return the time of the switch that a plan begins with."""
        old = self._merged
        if plan.merged == (None if old is None else old.digest):
            return 0.0
        # Kept apart from the others: an adapter may leave its blocks and stay merged.
        self._merged = None if plan.merged is None else self._refs[plan.merged]
        return self._merging.switch_s(old, self._merged)

    def _work(self, plan: StepPlan, hosted: frozenset[object] = _NOBODY) -> Iterator[SequenceWork]:
        """Yield what the device does; for the adapters in ``hosted`` the host adds theirs."""
        for step in plan.sequences:
            adapter = self._adapters[step.request_id]
            if adapter is None or adapter == plan.merged or adapter in hosted:
                yield SequenceWork(step.start, step.tokens, step.samples, None, 0.0)
            else:
                yield SequenceWork(step.start, step.tokens, step.samples, adapter, self._ranks[adapter])

    def _assisted_s(self, plan: StepPlan, group_ends_s: GroupEnds) -> float:
        """Return the time of a step on some layers of which the host adds what cold adapters add."""
        costs, assisted = self._transfers.profile.need(self._assist, "host_lora"), frozenset(plan.assisted)
        cold: dict[AdapterDigest, ColdAdapter] = {}
        for digest in plan.assisted:
            ref, move = self._refs[digest], self._last_moves[digest]
            arrivals_s = layer_arrivals_s(ref, move.groups, group_ends_s(move.transfer_id), self._transfers)
            rows = tuple(step.tokens for step in plan.sequences if self._adapters[step.request_id] == digest)
            cold[digest] = ColdAdapter(arrivals_s, rows, costs.rank(ref), range(*move.left_to_host))
        return prefill_s(
            lambda there: self._model.step_s(step_work(self._work(plan, assisted - there), plan.kernel_form)),
            cold,
            costs,
        )


CATCH_UP_S = 0.01
"""A step that begins so soon after the last one's end counts as beginning right then: the loop's own time between two
steps is the model's, not this machine's."""

_ORDINARY_TOKENS = (300, 10_000)
"""Ordinary tokens in the usual vocabularies: special and byte tokens lie below, or far above."""


def build_modelled_executor(
    settings: Settings, profile: CostProfile, preset: Preset, clock: VirtualClock, *, coalesced: bool
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a simulation.

    Args:
        settings: of the engine; ``settings.model.max_model_len`` may exceed the profile's, since no time depends
            on it.
        profile: what things cost.
        preset: of the replica.
        clock: is moved by it.
        coalesced: whether a repeat stands for as many turns of the engine's loop (see ``Engine.step``).

    Raises:
        ConfigError: a setting does not fit the profile.
    """
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=coalesced)
    link = ModelledTransferLink(transfers.course)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), coalesced=coalesced)
    return executor, sizes_of(settings, profile, "modelled")._replace(assist=_assist(settings, transfers, preset))


def build_paced_executor(
    settings: Settings, preset: Preset, clock: WaitableClock, on_transfer_done: Callable[[], None]
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a replica without arithmetic.

    Args:
        settings: all; ``engine.profile`` is a name or a file, ``model.model`` a folder with the same model's
            ``config.json`` and tokenizer, whose weights nobody reads.
        preset: of the replica.
        clock: the real one.
        on_transfer_done: called, on another thread, when a transfer has ended.

    Raises:
        ConfigError: no profile is named, or a setting does not fit it.
        ProfileError: there is no such profile.
        ValueError: the model's config cannot be read.
    """
    if not settings.engine.profile:
        raise ConfigError("engine.profile: a paced executor needs the name or the file of a profile")
    profile = load_profile(settings.engine.profile)
    geometry = read_model_config(Path(settings.model.model)).geometry(profile.geometry.dtype_bytes)
    if geometry != profile.geometry:
        raise ConfigError(f"profile {profile.name} is of {profile.model}, {settings.model.model} is another model")
    if settings.model.max_model_len > profile.max_model_len:
        raise ConfigError(
            f"max_model_len: {settings.model.max_model_len} is more than the {profile.max_model_len} of "
            f"profile {profile.name}"
        )
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    link = ModelledTransferLink(transfers.course, on_transfer_done)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), CATCH_UP_S)
    return executor, sizes_of(settings, profile, "paced")._replace(assist=_assist(settings, transfers, preset))


def _assist(settings: Settings, transfers: TransferModel, preset: Preset) -> AssistCosts | None:
    """Return what assisted prefills cost, on as many cores as the profile says; None without workers or host memory."""
    engine = settings.engine
    return assist_costs(transfers, preset) if engine.host_lora_workers and engine.host_memory_bytes else None


def transfer_model(engine: EngineSettings, profile: CostProfile) -> TransferModel:
    """Return what transfers cost an engine with these settings, by ``profile`` or by the link that they declare."""
    return TransferModel(profile, profile.geometry.block_bytes(engine.block_size), engine.link_bytes_per_s)


def sizes_of(settings: Settings, profile: CostProfile, executor: str) -> EngineSizes:
    """Return the sizes of a replica by ``profile``: ``engine.memory_bytes`` of device memory, or all that it has.

    A modelled replica is one rank however many the profile stands for: blocks are of the whole model.

    Raises:
        ConfigError: that cannot hold the longest sequence.
    """
    engine, geometry = settings.engine, profile.geometry
    longest_tokens = settings.model.max_model_len or profile.max_model_len
    block_bytes = geometry.block_bytes(engine.block_size)
    total_blocks = (engine.memory_bytes or profile.pool_bytes) // block_bytes
    sequence_blocks = -(-longest_tokens // engine.block_size)
    if total_blocks <= sequence_blocks:
        raise ConfigError(
            f"memory of {total_blocks} blocks cannot hold a sequence of {longest_tokens} tokens, "
            f"{sequence_blocks} blocks of {block_bytes} bytes, beside an adapter"
        )
    return EngineSizes(
        geometry=geometry,
        local_geometry=geometry,
        total_blocks=total_blocks,
        host_blocks=engine.host_memory_bytes // block_bytes,
        block_size=engine.block_size,
        max_model_len=longest_tokens,
        max_adapter_blocks=total_blocks - sequence_blocks,
        kernels=f"none: {executor} by profile {profile.name}",
        async_scheduling=profile.overlapped and not engine.enforce_eager and engine.tensor_parallel == 1,
    )


def _tokens_of(profile: CostProfile) -> SeededTokens:
    low, high = _ORDINARY_TOKENS
    return SeededTokens(min(low, profile.vocabulary // 2), min(high, profile.vocabulary - 1))
