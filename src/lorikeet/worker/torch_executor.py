"""The torch executor: runs plans with real weights on rank 0 and leads the other ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from lorikeet.config import ConfigError, Settings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import NOT_FINITE, Pooled, PromptLogprobs, StepPlan, StepResult, Token, TransferDone
from lorikeet.costs.engine_sizes import EngineSizes, ImageSizes
from lorikeet.memory.sizing import sequence_blocks
from lorikeet.models.config import BaseConfig, ModelConfig, max_model_len
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.presets import ColdStart, resolve_preset
from lorikeet.worker.batch import RankSequence, drafted_sequences
from lorikeet.worker.decode_graphs import DecodeGraphs, build_graphs
from lorikeet.worker.grammars import GrammarCompiler, GrammarMasks
from lorikeet.worker.host_lora.assisted_step import HostLoraLeader
from lorikeet.worker.host_lora.start import build_host_lora, start_worker_processes
from lorikeet.worker.memory_profiling import arena_blocks, host_arena_blocks
from lorikeet.worker.rank import Rank, sampling_steps
from lorikeet.worker.rank_setup import RankModel, allocate_arena, load_rank, read_base_config
from lorikeet.worker.sampler import Sampled, Sampler
from lorikeet.worker.tensor_parallel import RankProcesses
from lorikeet.worker.threads import CpuBudget, requested_threads
from lorikeet.worker.transfer.finished import FinishedTransfers
from lorikeet.worker.transfer.loader import start_loader_process
from lorikeet.worker.transfer.transfers import TransferManager


class StepRunner(Protocol):
    """Runs the steps of one plan.

    Attributes:
        lead: number of steps that can be launched before the previous step's tokens are known.
        prompt_logprobs, pooled: the results of the steps launched so far.
    """

    lead: int
    prompt_logprobs: tuple[PromptLogprobs, ...]
    pooled: tuple[Pooled, ...]

    def launch(self) -> None:
        """Start the next step."""
        ...

    def take(self) -> "list[StepTokens]":
        """Wait for the oldest launched step, and return the step's result for each sampling sequence.

        The caller appends the tokens to the sequences before it launches
        another step beyond the lead.
        """
        ...


class StepTokens(NamedTuple):
    """A sequence's tokens of a step: one, or more if a draft was right or a grammar leaves no choice.

    Attributes:
        tokens: the tokens in order.
        failure: why there are no tokens; empty if there are tokens.
    """

    tokens: list[Token]
    failure: str = ""

    @classmethod
    def of(cls, token: Token | str) -> "StepTokens":
        """Return the sampler's result for one row."""
        return cls([], token) if isinstance(token, str) else cls([token])


class EagerRunner:
    """Runs steps of any kind, one kernel launch at a time.

    Args:
        rank: the rank that computes the steps.
        sampler: the sampler of the tokens.
        plan: the plan, already applied to the rank.
        sequences: the sequences that yield tokens.
    """

    lead = 0

    def __init__(self, rank: Rank, sampler: Sampler, plan: StepPlan, sequences: Sequence[RankSequence]) -> None:
        self._rank = rank
        self._sampler = sampler
        self._plan = plan
        drafts = [step.draft for step in sampling_steps(plan)]
        self._drafts: Sequence[tuple[int, ...]] = drafts if any(drafts) else ()
        self._sampled: Sequence[Sampled] = sequences
        if self._drafts:
            pairs = zip(sequences, drafts, strict=True)
            self._sampled = [each for sequence, draft in pairs for each in drafted_sequences(sequence, draft)]
        self._ran = 0
        self._logits: Tensor | None = None
        self.prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        self.pooled: tuple[Pooled, ...] = ()

    def launch(self) -> None:
        """Compute the logits of the next step."""
        self._sampler.begin(self._sampled)
        output = self._rank.forward(self._plan, self._ran)
        self._logits = output.logits
        self.prompt_logprobs += output.prompt_logprobs
        self.pooled += output.pooled
        self._ran += 1

    def take(self) -> list[StepTokens]:
        """Sample the tokens of the oldest step.

        Without sampling sequences, wait for the device, so that the plan's duration is right.
        """
        assert self._logits is not None
        if not self._sampled:
            self._rank.wait()
        sampled = self._sampler.sample(self._logits, self._sampled)
        forced = self._sampler.take_forced()
        if not self._drafts:
            found = [StepTokens.of(token) for token in sampled]
            for row, token_ids in forced.items():
                found[row].tokens.extend(map(Token, token_ids))
            return found
        found = []
        first = 0
        for draft in self._drafts:
            found.append(_accepted(sampled[first : first + len(draft) + 1], draft, first, forced))
            first += len(draft) + 1
        return found


def _accepted(
    sampled: Sequence[Token | str], draft: Sequence[int], first: int, forced: Mapping[int, tuple[int, ...]]
) -> StepTokens:
    """Return a step's accepted tokens: the draft up to the first difference, the token there, and forced tokens.

    Args:
        sampled: the sampled token before the draft and after each drafted token, or the reason why there is none.
        draft: the drafted tokens.
        first: the row of the first token in ``sampled``.
        forced: by row, the tokens that must follow the sampled token.
    """
    tokens: list[Token] = []
    for at, token in enumerate(sampled):
        if isinstance(token, str):
            return StepTokens([], token)
        tokens.append(token)
        if at == len(draft) or token.token_id != draft[at]:
            tokens.extend(map(Token, forced.get(first + at, ())))
            break
    return StepTokens(tokens)


class GraphRunner:
    """Runs steps in which every sequence decodes, as CUDA graphs.

    The device feeds the tokens of one step to the next. If the host edits logits or reports log probabilities, the host
    sends the inputs of every step instead, and no step is launched ahead.

    Args:
        graphs: the rank's graphs.
        rank, sampler, plan, sequences: see :class:`EagerRunner`.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        rank: Rank,
        sampler: Sampler,
        plan: StepPlan,
        sequences: Sequence[RankSequence],
    ) -> None:
        self._graphs = graphs
        self._rank = rank
        self._sampler = sampler
        self._plan = plan
        self._sequences = sequences
        self._kept_rows: Sequence[int] = range(len(sequences))
        self._runs_ahead = sampler.needs_only_choose(sequences)
        self._ran = 0
        self.lead = 1 if self._runs_ahead else 0
        self.prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        self.pooled: tuple[Pooled, ...] = ()

    def keep(self, sequences: Sequence[RankSequence]) -> None:
        """Keep only these sequences in later results. If some sequences have ended, no further step may be launched."""
        rows = {sequence.request_id: row for row, sequence in enumerate(self._sequences)}
        self._kept_rows = [rows[sequence.request_id] for sequence in sequences]

    def launch(self) -> None:
        """Replay the graph."""
        assert len(self._kept_rows) == len(self._sequences), "blocks of sequences that ended may be in use by others"
        if self._ran == 0 or not self._runs_ahead:
            rows, lora = self._rank.decode_rows(self._plan, self._ran)
            self._graphs.start(rows, lora, self._sampler.parameters(self._sequences))
        self._graphs.launch()
        if not self._runs_ahead:
            self._sampler.begin(self._sequences)
        self._ran += 1

    def take(self) -> list[StepTokens]:
        """Wait for the tokens of the oldest step."""
        chosen = self._graphs.take()
        if self._runs_ahead:
            return [StepTokens.of(NOT_FINITE if chosen[row] < 0 else Token(chosen[row])) for row in self._kept_rows]
        sampled = self._sampler.sample(self._graphs.logits[: len(chosen)], self._sequences, chosen)
        found = [StepTokens.of(token) for token in sampled]
        for row, token_ids in self._sampler.take_forced().items():
            found[row].tokens.extend(map(Token, token_ids))
        return found


class _PlanRun(NamedTuple):
    """The outcome of a plan's steps.

    Attributes:
        tokens: tokens of each sampling sequence.
        failed: the requests that got no tokens, and why.
        steps_run: number of steps that ran.
        prompt_logprobs: log probabilities of the scored prompts.
        pooled: vectors of the pooled prompts.
    """

    tokens: list[list[Token]]
    failed: dict[RequestId, str]
    steps_run: int
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()


_DEAD_RANK_TIMEOUT_S = 5.0
"""Time after an error in which a message about the death of another rank may arrive."""


class OtherRanks(Protocol):
    """Rank 0's interface to the other ranks."""

    size: int
    """Number of ranks, rank 0 included."""

    def send(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Each rank starts it immediately."""
        ...

    def broadcast(self, token_ids: Sequence[int], *, has_more: bool) -> None:
        """Send a step's tokens to every rank, and whether another step of the plan follows."""
        ...

    def read_host(self, blocks: Sequence[BlockId]) -> list[tuple[bytes, ...]]:
        """Return the bytes of host blocks of each other rank, by rank.

        Raises:
            ExecutorError: a rank has died.
        """
        ...

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[Sequence[bytes]]) -> None:
        """Write host blocks of each other rank, by rank."""
        ...

    def check(self, grace_s: float = 0.0) -> None:
        """Check that no rank has died or dies within ``grace_s`` seconds.

        Raises:
            ExecutorError: a rank has died. The message names the rank and the reason.
        """
        ...

    def close(self) -> None:
        """Stop the ranks."""
        ...


class NoOtherRanks:
    """Stands for the other ranks if there is only rank 0."""

    size = 1

    def send(self, plan: StepPlan) -> None:
        """Do nothing."""

    def broadcast(self, token_ids: Sequence[int], *, has_more: bool) -> None:
        """Do nothing."""

    def read_host(self, blocks: Sequence[BlockId]) -> list[tuple[bytes, ...]]:
        """Return nothing."""
        return []

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[Sequence[bytes]]) -> None:
        """Do nothing."""

    def check(self, grace_s: float = 0.0) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TorchExecutor:
    """Runs rank 0's share of every step, samples tokens, and leads the other ranks.

    Implements ``core.executor.Executor``.

    Args:
        model: rank 0's share of the model.
        arena: the device arena, ``[blocks, elements]`` of the model's dtype.
        block_size: tokens of KV in a block.
        cores: rank 0's share of the machine's cores.
        finished: the collector of all ranks' finished transfers.
        transfers: rank 0's transfers, which report to ``finished``. It is also an attribute, for tests.
        others: the other ranks; None for a single rank.
        host_lora: the host LoRA for adapters that are being loaded; None if no plan has assisted prefills. It is also
            an attribute, for its counters.
        graphs: the CUDA graphs of decode steps; None if all steps run eagerly.
        grammars: the compiler of requests' grammars; None if no request can have a grammar. It is also an attribute.
    """

    def __init__(
        self,
        model: RankModel,
        arena: Tensor,
        block_size: int,
        cores: CpuBudget,
        finished: FinishedTransfers,
        transfers: TransferManager,
        others: OtherRanks | None = None,
        host_lora: HostLoraLeader | None = None,
        graphs: DecodeGraphs | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._graphs = graphs
        self.grammars = grammars
        self._others: OtherRanks = others or NoOtherRanks()
        # Other ranks get one token for each sequence and step, so a step cannot yield several.
        forces = self._others.size == 1
        self._masks = None if grammars is None else GrammarMasks(grammars, model.device, model.dtype, forces=forces)
        self._finished = finished
        self.transfers = transfers
        self._cores = cores
        self.host_lora = host_lora
        self._rank = Rank(model, arena, block_size, transfers, cores, host_lora)
        self._sampler = Sampler(model.kernels.choose, self._masks)
        self._running: GraphRunner | None = None
        self._returned_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the plan cannot be run, or a rank has died.
        """
        started_s = self._returned_s if plan.continues else time.monotonic()
        self._others.check()
        try:
            self._others.send(plan)
            switch_s = self._rank.apply(plan)
            with self._rank.pin_threads(plan):
                encoded = self._rank.encode(plan)
                ran = self._run(plan, started_s) if plan.sequences else _PlanRun([], {}, plan.repeat)
        except ExecutorError:
            raise
        except (RuntimeError, OSError) as error:
            # When a rank dies, a collective operation or a pipe fails first. The reason of the death is the better
            # message.
            self._others.check(grace_s=_DEAD_RANK_TIMEOUT_S)
            raise ExecutorError(f"step {plan.step}: {error}") from error
        by_request = {step.request_id: each for step, each in zip(sampling_steps(plan), ran.tokens, strict=True)}
        self._returned_s = time.monotonic()
        return StepResult(
            step=plan.step,
            tokens=tuple(tuple(by_request.get(step.request_id, ())) for step in plan.sequences),
            steps_run=ran.steps_run,
            duration_s=self._returned_s - started_s,
            failed=ran.failed | encoded.failed,
            switch_s=switch_s,
            next_runs=bool(plan.sequences) and self._running is not None,
            prompt_logprobs=ran.prompt_logprobs,
            pooled=ran.pooled,
            tower_s=encoded.seconds,
        )

    def assist_counters(self) -> AssistCounters | None:
        """Return the counters of host workers; None without host workers."""
        return None if self.host_lora is None else self.host_lora.counters

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers that every rank has finished since the last call.

        Raises:
            ExecutorError: a rank has died.
        """
        self._others.check()
        return self._finished.take()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Block until a transfer has completed, a rank has died, or ``timeout_s`` is over (None: no limit)."""
        self._finished.wait(timeout_s)

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return the bytes of host blocks, which no transfer may be writing: of each block the parts of all ranks.

        Raises:
            ExecutorError: a rank has died.
        """
        parts = [self.transfers.host_arena.read(blocks), *self._others.read_host(blocks)]
        return tuple(b"".join(block) for block in zip(*parts, strict=True))

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Write host blocks, which no transfer may be using. ``contents`` are from an executor with as many ranks."""
        size = self.transfers.host_arena.bytes.shape[1]
        parts = [
            [content[rank * size : (rank + 1) * size] for content in contents] for rank in range(self._others.size)
        ]
        self.transfers.host_arena.write(blocks, parts[0])
        self._others.write_host(blocks, parts[1:])

    def close(self) -> None:
        """Stop threads, loader processes, host workers and ranks. Running transfers are abandoned."""
        self._others.close()
        with suppress(RuntimeError):  # The device has failed, so it runs nothing any more.
            self._discard_running()
        if self.host_lora is not None:
            self.host_lora.close()
        self.transfers.close()
        for part in (self._masks, self.grammars):
            if part is not None:
                part.close()
        if self._graphs is not None:
            self._graphs.close()
        self._cores.close()

    def _run(self, plan: StepPlan, started_s: float) -> "_PlanRun":
        """Run the steps of a plan."""
        steps = sampling_steps(plan)
        sequences = [self._rank.sequence(step.request_id) for step in steps]
        runner, launched = self._start(plan, sequences)
        tokens: list[list[Token]] = [[] for _ in steps]
        failed: dict[RequestId, str] = {}
        ended: set[RequestId] = set()
        wanted = plan.repeat
        taken = 0
        while taken < wanted:
            while launched < min(wanted, taken + 1 + runner.lead):
                runner.launch()
                launched += 1
            found = runner.take()
            taken += 1
            for sequence, new, collected in zip(sequences, found, tokens, strict=True):
                if sequence.request_id in ended:
                    continue  # The step was launched before the end was known.
                collected += new.tokens
                if new.failure:
                    failed[sequence.request_id] = new.failure
                if new.failure or any(token.token_id in sequence.sampling.stop_token_ids for token in new.tokens):
                    ended.add(sequence.request_id)
            if plan.overlapped:
                wanted = taken  # Launched steps keep running.
            elif (
                ended
                or any(len(new.tokens) > 1 for new in found)
                or time.monotonic() - started_s >= plan.max_duration_s
            ):
                wanted = launched
            # A sequence that failed gets token 0 for the bookkeeping of this step. The engine drops the sequence next.
            chosen = [0 if new.failure else new.tokens[0].token_id for new in found]
            self._others.broadcast(chosen, has_more=taken < wanted)
            self._rank.append(steps, chosen)
            for sequence, new in zip(sequences, found, strict=True):
                for token in new.tokens[1:]:
                    sequence.add_token(token.token_id)
        self._running = runner if isinstance(runner, GraphRunner) and launched > taken else None
        return _PlanRun(tokens, failed, taken, runner.prompt_logprobs, runner.pooled)

    def _start(self, plan: StepPlan, sequences: Sequence[RankSequence]) -> tuple[StepRunner, int]:
        """Return the runner of a plan's steps, and the number of steps that have been launched already."""
        if plan.continues:
            assert self._running is not None, "no step is running"
            self._running.keep(sequences)
            return self._running, 1
        self._discard_running()
        if (
            self._graphs is not None
            and plan.fits_graphs
            and not (self._has_embeds(plan) or self._rank.has_extras(plan))
        ):
            return GraphRunner(self._graphs, self._rank, self._sampler, plan, sequences), 0
        return EagerRunner(self._rank, self._sampler, plan, sequences), 0

    def _has_embeds(self, plan: StepPlan) -> bool:
        """Return whether a step computes a token whose embedding was given, which graphs do not support."""
        return any(step.start < self._rank.sequence(step.request_id).embedded_tokens for step in plan.sequences)

    def _discard_running(self) -> None:
        """Wait for a step that was launched ahead, and discard its tokens."""
        if self._running is not None:
            self._running.take()
            self._running = None


def build_torch_executor(
    settings: Settings,
    model_folder: Path,
    progress: Callable[[str, int, int], None],
    on_transfer_done: Callable[[], None],
    before_pool: Callable[[], None] = lambda: None,
) -> tuple[TorchExecutor, BaseConfig, EngineSizes]:
    """Load the model, start ranks, loader process and host workers, and allocate memory.

    Args:
        settings: all settings.
        model_folder: folder of the checkpoint.
        progress: function called with (stage, done, total) while loading.
        on_transfer_done: function called on another thread when a transfer has completed or a rank has died.
        before_pool: function called once the weights are loaded, before the arenas are allocated.

    Returns:
        The executor, the model's config, and the sizes for the engine.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ModelConfigError: the model is not supported or does not split over the ranks.
        WeightError: the weights do not fit the config.
        ExecutorError: a rank, a loader process or a host worker did not start, or the device has failed.
    """
    engine = settings.engine
    _, preset = resolve_preset(engine.preset)
    config = read_base_config(settings, model_folder)
    is_own = isinstance(config, ModelConfig)
    # Host workers compute the products of attention and MLP only.
    can_assist = isinstance(config, ModelConfig) and config.recurrence is None
    longest_tokens = max_model_len(settings, config)
    cores = CpuBudget(requested_threads(engine.threads))
    ranks = engine.ranks
    finished = FinishedTransfers(ranks, on_transfer_done)
    with _device_errors(engine.device), ExitStack() as undo:
        loader = start_loader_process()
        undo.callback(loader.end)
        workers = start_worker_processes(engine, preset) if can_assist else []
        for worker in workers:
            undo.callback(worker.end)
        others = RankProcesses(settings, model_folder, finished) if ranks > 1 else None
        if others is not None:
            undo.callback(others.close)
        model = load_rank(settings, model_folder, (others and others.group) or SingleRankGroup(), progress)
        if others is not None:
            others.wait_until_ready()
        before_pool()
        blocks = arena_blocks(settings, model, longest_tokens)
        host_blocks = host_arena_blocks(settings, model, blocks)
        arena = allocate_arena(model, blocks, engine)
        transfers = TransferManager(
            arena,
            host_blocks,
            model.geometry,
            0,
            engine.tensor_parallel,
            loader,
            engine,
            finished.report,
            whole=model.whole_geometry,
        )
        undo.callback(transfers.close)
        if others is not None:
            others.allocate(blocks, host_blocks)
        transfers.loader.wait_until_ready()
        host_lora = None
        assist = None
        if workers:
            model.kernels.threads = cores.threads(time.monotonic())
            other_arenas = others.host_arenas(arena[:1].nbytes) if others is not None else []
            try:
                host_lora, assist = build_host_lora(
                    workers, settings, preset, model, arena, transfers, other_arenas, longest_tokens
                )
            except ConfigError:  # The host arena is too small.
                if preset.cold_start is ColdStart.ASSIST or others is not None:
                    raise
            else:
                undo.callback(host_lora.close)
                if others is not None:
                    others.send_ring(host_lora.pool.ring)
        if others is not None:
            others.watch()
        graphs = build_graphs(engine, model, arena, transfers.device, longest_tokens)
        undo.pop_all()
    grammars = GrammarCompiler(model_folder / "tokenizer.json", model.config.vocab_size, config.eos_token_ids)
    executor = TorchExecutor(
        model, arena, engine.block_size, cores, finished, transfers, others, host_lora, graphs, grammars
    )
    sizes = EngineSizes(
        geometry=model.whole_geometry or model.geometry,
        local_geometry=model.geometry,
        total_blocks=blocks,
        host_blocks=host_blocks,
        block_size=engine.block_size,
        max_model_len=longest_tokens,
        max_adapter_blocks=blocks - sequence_blocks(settings, model.geometry, longest_tokens),
        kernels=model.kernels.name,
        weights=model.weights,
        assist=assist,
        async_scheduling=graphs is not None,
        base=model.base_info(),
        can_merge=is_own,
        images=None if model.tower is None else ImageSizes(*model.tower.sizes),
    )
    return executor, config, sizes


@contextmanager
def _device_errors(device: str) -> Iterator[None]:
    """Turn device errors, such as out of memory, into ``ExecutorError``."""
    try:
        yield
    except ExecutorError:
        raise
    except RuntimeError as error:
        raise ExecutorError(f"{device}: {error}") from error
