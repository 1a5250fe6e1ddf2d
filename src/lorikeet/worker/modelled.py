"""Executors without arithmetic: a cost model gives the times of steps and transfers.

The modelled executor runs on a virtual clock, the paced executor in real time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol

from lorikeet.config import ConfigError, EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock, WaitableClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.messages import BaseInfo
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Tier, Token, Transfer, TransferDone
from lorikeet.core.text import format_size
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.cold_prefill import ColdAdapter, assist_costs, layer_arrivals_s, prefill_s
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.iteration_costs import iteration_costs
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.profile_checks import check_model
from lorikeet.costs.transfer_model import MergeModel, TransferModel
from lorikeet.memory.host_arena import HOST_TIMES_DEVICE
from lorikeet.memory.sizing import sequence_blocks
from lorikeet.models.config import read_model_config
from lorikeet.presets import Preset
from lorikeet.worker.links import ModelledTransferLink, TransferLink

GroupEnds = Callable[[int], Sequence[float]]
"""Returns when each group of a running transfer arrives, by transfer id, in seconds from the plan's start."""


class PlanDuration(NamedTuple):
    """The modelled times of a plan.

    Attributes:
        steps: number of steps that run: 0 for a plan without sequences, else at least 1.
        seconds: seconds of the steps, including a merge before them.
        loop_s: seconds of the engine loop after the steps.
        switch_s: the part of ``seconds`` that goes into merging or unmerging.
        next_runs: whether the plan's next step is already running (async scheduling).
    """

    steps: int
    seconds: float
    loop_s: float
    switch_s: float = 0.0
    next_runs: bool = False


class PlanTimes(Protocol):
    """Gives the times of plans."""

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> PlanDuration:
        """Return the number of a plan's identical steps that run within ``limit_s`` seconds, and their times."""
        ...


class TokenChoice(Protocol):
    """Gives output tokens."""

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...] | str:
        """Return ``count`` tokens from ``position`` on, or the reason why there are none."""
        ...


class SeededTokens:
    """Gives tokens as a function of (seed, position).

    The tokens avoid a request's stop tokens, so that an answer has ``max_tokens`` tokens.

    Args:
        low, high: the lowest and highest token id to choose from.
    """

    def __init__(self, low: int, high: int) -> None:
        self._tokens = [Token(token_id) for token_id in range(low, high + 1)]
        # Every answer runs through the same cycle of tokens, from a different start.
        self._cycle = tuple(self._tokens[at * 7_919 % len(self._tokens)] for at in range(len(self._tokens)))
        self._alone = tuple((token,) for token in self._cycle)

    def tokens(self, start: SequenceStart, position: int, count: int) -> tuple[Token, ...]:
        """Return ``count`` tokens from ``position`` on."""
        cycle = self._cycle
        stops = start.sampling.stop_token_ids
        first = (start.sampling.seed * 1_000_003 + 12_345 + position) % len(cycle)
        if count == 1 and not stops:  # This is the usual case.
            return self._alone[first]
        chosen = cycle[first : first + count]
        while len(chosen) < count:
            chosen += cycle[: count - len(chosen)]
        return tuple(self._after(token, stops) for token in chosen) if stops else chosen

    def _after(self, token: Token, stops: tuple[int, ...]) -> Token:
        index = token.token_id - self._tokens[0].token_id
        while self._tokens[index % len(self._tokens)].token_id in stops:
            index += 1
        return self._tokens[index % len(self._tokens)]


class ModelledExecutor:
    """Runs plans by waiting for their modelled time.

    Implements ``Executor``.

    Args:
        clock: a virtual or a real clock.
        times: the source of the times of plans.
        link: the link that runs the transfers.
        choice: the source of the output tokens.
        catch_up_s: seconds by which a step may begin late, on a real clock, and still count as beginning at the end of
            the step before.
        coalesced: whether a repeat stands for single steps. If so, a repeat ends when a transfer ends, so that the
            engine can plan again. A live repeat does not.
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
        """Start the plan's transfers, wait for the modelled time of the steps, and return the tokens."""
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
        given: list[tuple[Token, ...]] = []
        failed: dict[RequestId, str] = {}
        choose = self._choice.tokens
        starts = self._starts
        steps = times.steps
        for step in plan.sequences:
            request_id = step.request_id
            tokens = choose(starts[request_id], step.start + step.tokens, steps) if step.samples else ()
            if isinstance(tokens, str):
                failed[request_id] = tokens
                tokens = ()
            given.append(tokens)
        return StepResult(plan.step, tuple(given), steps, times.seconds, failed, times.switch_s, times.next_runs)

    def assist_counters(self) -> None:
        """Return None, since a modelled executor has no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers that have ended since the last call."""
        return self._link.take_done(self._clock.now())

    def next_transfer_s(self) -> float | None:
        """Return the time at which the next transfer ends if nothing else starts. None without transfers."""
        return self._link.next_s()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Wait until the next transfer has ended, or for ``timeout_s``.

        Raises:
            ExecutorError: no transfer is running and there is no timeout.
        """
        next_end_s = self._link.next_s()
        due = [] if next_end_s is None else [next_end_s]
        if timeout_s is not None:
            due.append(self._clock.now() + timeout_s)
        if not due:
            raise ExecutorError("cannot wait for a transfer: no transfer is in flight")
        self._clock.wait_until(min(due))

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return empty contents, since modelled blocks hold no bytes."""
        return (b"",) * len(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Do nothing, since modelled blocks hold no bytes."""

    def close(self) -> None:
        """Do nothing."""

    def _group_ends_s(self, now: float, transfer_id: int) -> list[float]:
        return [end_s - now for end_s in self._link.group_ends_s(transfer_id, now)]


_NO_ADAPTERS: frozenset[object] = frozenset()


class ModelledTimes:
    """Computes the times of plans with a cost model.

    Steps on merged weights cost the same as the base model. If the merged adapter changes, the plan starts with the
    time of the merge. Assisted prefills are modelled by ``costs.cold_prefill``. With async scheduling one step of a
    plan runs, and the engine loop overlaps with the next step.

    Args:
        transfers: the costs of transfers. The profile in it has all other constants.
        preset: preset of the replica.
        loop_each_step: whether each step of a repeat costs a turn of the engine loop. If not, the whole repeat costs
            one turn.
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
        self._last_transfers: dict[AdapterDigest, Transfer] = {}
        self._adapters: dict[RequestId, AdapterDigest | None] = {}
        self._merged: AdapterRef | None = None

    def steps_s(self, plan: StepPlan, limit_s: float, group_ends_s: GroupEnds) -> PlanDuration:
        """Return the number of a plan's steps that run within ``limit_s`` seconds, and their times.

        Raises:
            ProfileError: the profile lacks something that the plan needs.
        """
        self.note(plan)
        if not plan.sequences:
            return PlanDuration(0, 0.0, 0.0)
        switch_s = self._switch_s(plan)
        loop_s = self._model.loop_s(len(plan.sequences))
        if plan.assisted:
            return PlanDuration(1, switch_s + self._assisted_s(plan, group_ends_s), loop_s, switch_s)
        work = step_work(self._work(plan), plan.kernel_form)
        step_s = self._model.step_s(work)
        growth_s = self._model.growth_s(work)
        if plan.overlapped:
            next_runs = plan.repeat > 1
            step_s = max(step_s, loop_s) if plan.continues else step_s
            return PlanDuration(1, switch_s + step_s, 0.0 if next_runs else loop_s, switch_s, next_runs)
        between_s = loop_s if self._loop_each_step else 0.0
        ran = 1
        seconds = switch_s + step_s
        while ran < plan.repeat and seconds + ran * between_s < limit_s:
            step_s += growth_s
            seconds += step_s
            ran += 1
        return PlanDuration(ran, seconds, loop_s + (ran - 1) * between_s, switch_s)

    def note(self, plan: StepPlan) -> None:
        """Record a plan's sequences, adapters and transfers, for the times of later plans."""
        for digest in plan.evictions:
            self._ranks.pop(digest, None)
            self._refs.pop(digest, None)
            self._last_transfers.pop(digest, None)
        for transfer in plan.transfers:
            ref = transfer.adapter
            if ref is not None and transfer.target is Tier.DEVICE:
                self._refs[ref.digest] = ref
                self._ranks[ref.digest] = self._model.adapter_rank(ref)
                self._last_transfers[ref.digest] = transfer
        for request_id in plan.drops:
            del self._adapters[request_id]
        for start in plan.starts:
            self._adapters[start.request_id] = start.adapter

    def _switch_s(self, plan: StepPlan) -> float:
        """Return the seconds of the merge or unmerge with which a plan starts, 0 without one."""
        old = self._merged
        if plan.merged == (None if old is None else old.digest):
            return 0.0
        # The merged adapter is not kept in _refs, since an evicted adapter may stay merged.
        self._merged = None if plan.merged is None else self._refs[plan.merged]
        return self._merging.switch_s(old, self._merged)

    def _work(self, plan: StepPlan, on_host: frozenset[object] = _NO_ADAPTERS) -> Iterator[SequenceWork]:
        """Yield the device's work, without LoRA for the adapters in ``on_host``."""
        for step in plan.sequences:
            adapter = self._adapters[step.request_id]
            if adapter is None or adapter == plan.merged or adapter in on_host:
                yield SequenceWork(step.start, step.tokens, step.samples, None, 0.0)
            else:
                yield SequenceWork(step.start, step.tokens, step.samples, adapter, self._ranks[adapter])

    def _assisted_s(self, plan: StepPlan, group_ends_s: GroupEnds) -> float:
        """Return the seconds of a step with assisted prefills."""
        costs = self._transfers.profile.need(self._assist, "host_lora")
        assisted = frozenset(plan.assisted)
        cold: dict[AdapterDigest, ColdAdapter] = {}
        for digest in plan.assisted:
            ref = self._refs[digest]
            transfer = self._last_transfers[digest]
            arrivals_s = layer_arrivals_s(ref, transfer.groups, group_ends_s(transfer.transfer_id), self._transfers)
            rows = tuple(step.tokens for step in plan.sequences if self._adapters[step.request_id] == digest)
            handovers = costs.handovers(ref)
            cold[digest] = ColdAdapter(arrivals_s, rows, costs.rank(ref), range(*transfer.left_to_host), handovers)
        return prefill_s(
            lambda arrived: self._model.step_s(step_work(self._work(plan, assisted - arrived), plan.kernel_form)),
            cold,
            costs,
        )


CATCH_UP_S = 0.01
"""A step that begins within this time after the last step's end counts as beginning at that end: the loop's time
between two steps is the model's, not this machine's."""

_ORDINARY_TOKENS = (300, 10_000)
"""Range of ordinary tokens in common vocabularies. Special and byte tokens are below it, or far above."""


def build_modelled_executor(
    settings: Settings, profile: CostProfile, preset: Preset, clock: VirtualClock, *, coalesced: bool
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a simulation.

    Args:
        settings: the engine's settings. ``settings.model.max_model_len`` may exceed the profile's, since no time
            depends on it.
        profile: the profile with the costs.
        preset: preset of the replica.
        clock: the clock, which the executor moves forward.
        coalesced: whether each step of a repeat costs a turn of the engine loop (see ``Engine.step``).

    Raises:
        ConfigError: a setting does not fit the profile.
    """
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=coalesced)
    link = ModelledTransferLink(transfers.path)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), coalesced=coalesced)
    return executor, _with_costs(sizes_of(settings, profile, "modelled"), settings, transfers, preset)


def build_paced_executor(
    settings: Settings, preset: Preset, clock: WaitableClock, on_transfer_done: Callable[[], None]
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a paced replica.

    Args:
        settings: all settings. ``engine.profile`` is a name or a file. ``model.model`` is a folder with the same
            model's ``config.json`` and tokenizer. Weights are not read.
        preset: preset of the replica.
        clock: the real clock.
        on_transfer_done: function called on another thread when a transfer has ended.

    Raises:
        ConfigError: the settings name no profile, or do not fit the profile.
        ProfileError: the profile does not exist, or was made for another model.
        ValueError: the model's config cannot be read.
    """
    if not settings.engine.profile:
        raise ConfigError("engine.profile: a paced executor needs the name or file of a profile")
    profile = load_profile(settings.engine.profile)
    config = read_model_config(Path(settings.model.model))
    check_model(profile, config.geometry(profile.geometry.dtype_bytes), settings.model.model)
    if settings.model.max_model_len > profile.max_model_len:
        raise ConfigError(
            f"max_model_len: {settings.model.max_model_len} is more than the {profile.max_model_len} of "
            f"profile {profile.name}"
        )
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    link = ModelledTransferLink(transfers.path, on_transfer_done)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), CATCH_UP_S)
    sizes = _with_costs(sizes_of(settings, profile, "paced"), settings, transfers, preset)
    dtype = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
    base = BaseInfo(config.architecture, "nothing (paced)", config.vocab_size, config.eos_token_ids, dtype)
    return executor, sizes._replace(base=base)


def _with_costs(sizes: EngineSizes, settings: Settings, transfers: TransferModel, preset: Preset) -> EngineSizes:
    """Return the sizes with the costs that policies use.

    Costs of assisted prefills are included if there are host workers and host memory.
    """
    has_host = settings.engine.host_lora_workers and settings.engine.host_memory_bytes != 0
    assist = assist_costs(transfers, preset) if has_host else None
    return sizes._replace(assist=assist, iterations=iteration_costs(transfers, preset))


def transfer_model(engine: EngineSettings, profile: CostProfile) -> TransferModel:
    """Return the costs of transfers with these settings, from ``profile`` or the declared link."""
    return TransferModel(profile, profile.geometry.block_bytes(engine.block_size), engine.link_bytes_per_s)


def sizes_of(settings: Settings, profile: CostProfile, executor: str) -> EngineSizes:
    """Return the sizes of a replica with ``engine.memory_bytes`` of device memory, or all that the profile has.

    A modelled replica has one rank even if the profile stands for several ranks, so a block holds a part of the whole
    model.

    Raises:
        ConfigError: the memory cannot hold the longest sequence and an adapter.
    """
    engine = settings.engine
    geometry = profile.geometry
    longest_tokens = settings.model.max_model_len or profile.max_model_len
    block_bytes = geometry.block_bytes(engine.block_size)
    total_blocks = (engine.memory_bytes or profile.pool_bytes) // block_bytes
    most_blocks = sequence_blocks(settings, geometry, longest_tokens)
    if total_blocks <= most_blocks:
        given = f"memory_bytes {format_size(engine.memory_bytes)}" if engine.memory_bytes else "the profile's memory"
        least_mib = -(-(most_blocks + 1) * block_bytes // 2**20)
        raise ConfigError(
            f"{given} is too small for a sequence of {longest_tokens} tokens and an adapter; at least {least_mib} MiB, "
            "or lower max_model_len"
        )
    return EngineSizes(
        geometry=geometry,
        local_geometry=geometry,
        total_blocks=total_blocks,
        host_blocks=HOST_TIMES_DEVICE * total_blocks
        if engine.host_memory_bytes is None
        else engine.host_memory_bytes // block_bytes,
        block_size=engine.block_size,
        max_model_len=longest_tokens,
        max_adapter_blocks=total_blocks - most_blocks,
        kernels=f"none: {executor} by profile {profile.name}",
        async_scheduling=profile.overlapped and not engine.enforce_eager and engine.tensor_parallel == 1,
    )


def _tokens_of(profile: CostProfile) -> SeededTokens:
    low, high = _ORDINARY_TOKENS
    return _seeded_tokens(min(low, profile.vocabulary // 2), min(high, profile.vocabulary - 1))


@lru_cache
def _seeded_tokens(low: int, high: int) -> SeededTokens:
    """Return the tokens for all engines of this process, which share the table of almost a megabyte."""
    return SeededTokens(low, high)
