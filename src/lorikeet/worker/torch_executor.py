"""The executor with real arithmetic, in torch, and the runners of its steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from lorikeet.config import Settings
from lorikeet.core.executor import EngineSizes, ExecutorError
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, Token, TransferDone
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.presets import resolve_preset
from lorikeet.worker.batch import SequenceState as RankSequence
from lorikeet.worker.decode_graphs import DecodeGraphs, build_graphs
from lorikeet.worker.host_lora.assisted_step import HostLoraLeader
from lorikeet.worker.host_lora.start import build_host_lora, start_worker_processes
from lorikeet.worker.memory_profiling import arena_blocks, host_arena_blocks
from lorikeet.worker.rank import Rank, sampling_steps
from lorikeet.worker.rank_setup import RankModel, allocate_arena, load_rank, max_model_len
from lorikeet.worker.sampler import Sampler
from lorikeet.worker.tensor_parallel import RankProcesses
from lorikeet.worker.threads import CpuBudget, requested_threads
from lorikeet.worker.transfer.finished import FinishedTransfers
from lorikeet.worker.transfer.loader import start_loader_process
from lorikeet.worker.transfer.transfers import TransferManager


class StepRunner(Protocol):
    """The steps of one plan.

    Attributes:
        lead: steps that can be launched before the tokens of the last one are known.
    """

    lead: int

    def launch(self) -> None:
        """Begin the next step."""
        ...

    def take(self) -> list[Token | None]:
        """Return what the oldest step chose for each sequence that samples; None where it could not.

        The rank's sequences get these tokens before another step is launched, but for the lead.
        """
        ...


class EagerRunner:
    """Steps of any kind.

    Args:
        rank: computes.
        sampler: chooses.
        plan: applied.
        sequences: that sample.
    """

    lead = 0

    def __init__(self, rank: Rank, sampler: Sampler, plan: StepPlan, sequences: Sequence[RankSequence]) -> None:
        self._rank = rank
        self._sampler = sampler
        self._plan = plan
        self._sequences = sequences
        self._ran = 0
        self._logits: Tensor | None = None

    def launch(self) -> None:
        """Compute logits."""
        self._logits = self._rank.forward(self._plan, self._ran)
        self._ran += 1

    def take(self) -> list[Token | None]:
        """Choose; where nobody samples, wait all the same, so that the plan lasts as long as its steps."""
        assert self._logits is not None
        if not self._sequences:
            self._rank.wait()
        return self._sampler.sample(self._logits, self._sequences)


class GraphRunner:
    """Steps in which every sequence decodes, as graphs. Arguments as of :class:`EagerRunner`.

    Where the host has a say in tokens, or reports on logits, each step is given its inputs anew.

    Args:
        graphs: of the rank.
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
        self._kept: Sequence[int] = range(len(sequences))
        self._is_alone = sampler.needs_nothing_more(sequences)
        self._ran = 0
        self.lead = 1 if self._is_alone else 0

    def keep(self, sequences: Sequence[RankSequence]) -> None:
        """Take tokens for these alone of the sequences; unless they are all, nothing more is launched."""
        rows = {sequence.request_id: row for row, sequence in enumerate(self._sequences)}
        self._kept = [rows[sequence.request_id] for sequence in sequences]

    def launch(self) -> None:
        """Replay."""
        assert len(self._kept) == len(self._sequences), "the blocks of those that left may be others' by now"
        if self._ran == 0 or not self._is_alone:
            rows, lora = self._rank.decodes(self._plan, self._ran)
            self._graphs.start(rows, lora, self._sampler.parameters(self._sequences))
        self._graphs.launch()
        self._ran += 1

    def take(self) -> list[Token | None]:
        """Wait for the tokens."""
        chosen = self._graphs.take()
        if self._is_alone:
            return [None if chosen[row] < 0 else Token(chosen[row]) for row in self._kept]
        return self._sampler.sample(self._graphs.logits[: len(chosen)], self._sequences, chosen)


_GRACE_S = 5.0
"""How long a rank's last words are waited for."""


class OtherRanks(Protocol):
    """The other tensor-parallel ranks, as rank 0 needs them."""

    size: int
    """Ranks in all, rank 0 included."""

    def send(self, plan: StepPlan) -> None:
        """Let every rank begin the plan."""
        ...

    def tell(self, token_ids: Sequence[int], *, go_on: bool) -> None:
        """Give every rank the tokens of a step, and whether another step follows."""
        ...

    def check(self, grace_s: float = 0.0) -> None:
        """Do nothing if all ranks are well, and still are after ``grace_s``.

        Raises:
            ExecutorError: one has died; the message says which and why.
        """
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class NoOtherRanks:
    """Rank 0 is alone."""

    size = 1

    def send(self, plan: StepPlan) -> None:
        """Nobody listens."""

    def tell(self, token_ids: Sequence[int], *, go_on: bool) -> None:
        """Nobody listens."""

    def check(self, grace_s: float = 0.0) -> None:
        """Nobody can have died."""

    def close(self) -> None:
        """Nothing is held."""


class TorchExecutor:
    """Rank 0: runs its share of every step, samples, and tells the other ranks. See ``engine.executor.Executor``.

    Args:
        model: rank 0's share.
        arena: ``[blocks, elements]`` of the model's dtype.
        block_size: tokens of KV in a block.
        cores: rank 0's part of the machine's.
        finished: where transfers are counted; made for as many ranks as ``peers`` has.
        transfers: rank 0's, which report there; also an attribute, to see who moved what.
        peers: the other ranks.
        host_lora: computes for adapters that are on their way; also an attribute, for its counters. None if plans
            never ask for it.
        graphs: of steps in which all decode; None if these are called as others are.
    """

    def __init__(
        self,
        model: RankModel,
        arena: Tensor,
        block_size: int,
        cores: CpuBudget,
        finished: FinishedTransfers,
        transfers: TransferManager,
        peers: OtherRanks | None = None,
        host_lora: HostLoraLeader | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._graphs = graphs
        self._peers: OtherRanks = peers or NoOtherRanks()
        self._finished = finished
        self.transfers = transfers
        self._cores = cores
        self.host_lora = host_lora
        self._rank = Rank(model, arena, block_size, transfers, cores, host_lora)
        self._sampler = Sampler(model.kernels.choose)
        self._under_way: GraphRunner | None = None
        self._returned_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and return its tokens.

        Raises:
            ExecutorError: the plan cannot be run, or a rank has died.
        """
        started_s = self._returned_s if plan.continues else time.monotonic()
        self._peers.check()
        try:
            self._peers.send(plan)
            switch_s = self._rank.apply(plan)
            with self._rank.at_work(plan):
                tokens, failed, steps_run = self._run(plan, started_s) if plan.sequences else ([], (), plan.repeat)
        except ExecutorError:
            raise
        except (RuntimeError, OSError) as error:
            # When a rank dies, what breaks first here is a collective or a pipe; the reason is the better message.
            self._peers.check(grace_s=_GRACE_S)
            raise ExecutorError(f"step {plan.step}: {error}") from error
        by_request = {step.request_id: sampled for step, sampled in zip(sampling_steps(plan), tokens, strict=True)}
        self._returned_s = time.monotonic()
        return StepResult(
            step=plan.step,
            tokens=tuple(tuple(by_request.get(step.request_id, ())) for step in plan.sequences),
            steps_run=steps_run,
            duration_s=self._returned_s - started_s,
            failed=failed,
            switch_s=switch_s,
            next_runs=bool(plan.sequences) and self._under_way is not None,
        )

    def assist_counters(self) -> AssistCounters | None:
        """See ``Executor``."""
        return None if self.host_lora is None else self.host_lora.counters

    def completed_transfers(self) -> list[TransferDone]:
        """Return the transfers that every rank has finished since the last call.

        Raises:
            ExecutorError: a rank has died.
        """
        self._peers.check()
        return self._finished.take()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Block until a transfer has completed, a rank has died, or ``timeout_s`` is over (None: no limit)."""
        self._finished.wait(timeout_s)

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """See ``Executor``."""
        assert self._peers.size == 1, "every rank has a part of each block"
        return tuple(self.transfers.host_arena.bytes[block].tobytes() for block in blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """See ``Executor``."""
        assert self._peers.size == 1, "every rank has a part of each block"
        for block, content in zip(blocks, contents, strict=True):
            self.transfers.host_arena.bytes[block] = np.frombuffer(content, np.uint8)

    def close(self) -> None:
        """End threads, loader processes, host workers and ranks. Transfers under way are abandoned."""
        self._peers.close()
        with suppress(RuntimeError):  # of a device that has failed, which does nothing any more
            self._forget()
        if self.host_lora is not None:
            self.host_lora.close()
        self.transfers.close()
        if self._graphs is not None:
            self._graphs.close()
        self._cores.close()

    def _run(self, plan: StepPlan, started_s: float) -> tuple[list[list[Token]], tuple[RequestId, ...], int]:
        """Return the tokens of each sequence that samples, those that failed, and how many steps ran."""
        steps = sampling_steps(plan)
        sequences = [self._rank.sequence(step.request_id) for step in steps]
        stepping, launched = self._take_up(plan, sequences)
        tokens: list[list[Token]] = [[] for _ in steps]
        failed: set[RequestId] = set()
        ended: set[RequestId] = set()
        wanted, taken = plan.repeat, 0
        while taken < wanted:
            while launched < min(wanted, taken + 1 + stepping.lead):
                stepping.launch()
                launched += 1
            sampled = stepping.take()
            taken += 1
            for sequence, token, collected in zip(sequences, sampled, tokens, strict=True):
                if sequence.request_id in ended:
                    continue  # a step that had begun before its end was known
                if token is None:
                    failed.add(sequence.request_id)
                else:
                    collected.append(token)
                if token is None or token.token_id in sequence.sampling.stop_token_ids:
                    ended.add(sequence.request_id)
            if plan.overlapped:
                wanted = taken  # whatever has begun runs on
            elif ended or time.monotonic() - started_s >= plan.max_duration_s:
                wanted = launched
            # A sequence that failed gets some token for the rest of this step's bookkeeping; it is dropped next.
            chosen = [0 if token is None else token.token_id for token in sampled]
            self._peers.tell(chosen, go_on=taken < wanted)
            self._rank.append(steps, chosen)
        self._under_way = stepping if isinstance(stepping, GraphRunner) and launched > taken else None
        return tokens, tuple(step.request_id for step in steps if step.request_id in failed), taken

    def _take_up(self, plan: StepPlan, sequences: Sequence[RankSequence]) -> tuple[StepRunner, int]:
        """Return the steps of a plan, and how many of them have been launched."""
        if plan.continues:
            assert self._under_way is not None, "no step is under way"
            self._under_way.keep(sequences)
            return self._under_way, 1
        self._forget()
        if self._graphs is not None and plan.fits_graphs:
            return GraphRunner(self._graphs, self._rank, self._sampler, plan, sequences), 0
        return EagerRunner(self._rank, self._sampler, plan, sequences), 0

    def _forget(self) -> None:
        """Wait for a step that nobody wants any more."""
        if self._under_way is not None:
            self._under_way.take()
            self._under_way = None


def build_torch_executor(
    settings: Settings,
    model_folder: Path,
    progress: Callable[[str, int, int], None],
    on_transfer_done: Callable[[], None],
) -> tuple[TorchExecutor, ModelConfig, EngineSizes]:
    """Load the model, start the other ranks and a loader process, and take memory.

    Args:
        settings: all settings.
        model_folder: the checkpoint.
        progress: called with (stage, done, total) while loading.
        on_transfer_done: called, on another thread, when ``completed_transfers`` has something new or a rank has died.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ModelConfigError: the model is not supported or does not split over the ranks.
        WeightError: the weights do not fit the config.
        ExecutorError: a rank, a loader process or a host worker did not start, or the device has failed.
    """
    engine = settings.engine
    _, preset = resolve_preset(engine.preset)
    config = read_model_config(model_folder)
    config.check_divides(engine.tensor_parallel)
    longest_tokens = max_model_len(settings, config)
    cores = CpuBudget(requested_threads(engine.threads))
    ranks = engine.tensor_parallel
    finished = FinishedTransfers(ranks, on_transfer_done)
    with _device_errors(engine.device), ExitStack() as undo:
        loader = start_loader_process()
        undo.callback(loader.end)
        workers = start_worker_processes(engine, preset)
        for worker in workers:
            undo.callback(worker.end)
        peers = RankProcesses(settings, model_folder, finished) if ranks > 1 else None
        if peers is not None:
            undo.callback(peers.close)
        model = load_rank(settings, model_folder, (peers and peers.group) or SingleRankGroup(), progress)
        if peers is not None:
            peers.wait_until_ready()
        blocks, host_blocks = arena_blocks(settings, model, longest_tokens), host_arena_blocks(settings, model)
        arena = allocate_arena(model, blocks, engine)
        transfers = TransferManager(arena, host_blocks, model.geometry, 0, ranks, loader, engine, finished.report)
        undo.callback(transfers.close)
        if peers is not None:
            peers.allocate(blocks, host_blocks)
        transfers.loader.wait_until_ready()
        host_lora, assist = None, None
        if workers:
            model.kernels.threads = cores.threads(time.monotonic())
            others = peers.host_arenas(arena[:1].nbytes) if peers is not None else []
            host_lora, assist = build_host_lora(
                workers, settings, preset, model, arena, transfers, others, longest_tokens
            )
            undo.callback(host_lora.close)
            if peers is not None:
                peers.lead(host_lora.pool.ring)
        if peers is not None:
            peers.watch()
        graphs = build_graphs(engine, model, arena, transfers.device, longest_tokens)
        undo.pop_all()
    executor = TorchExecutor(model, arena, engine.block_size, cores, finished, transfers, peers, host_lora, graphs)
    sizes = EngineSizes(
        geometry=config.geometry(model.dtype.itemsize),
        local_geometry=model.geometry,
        total_blocks=blocks,
        host_blocks=host_blocks,
        block_size=engine.block_size,
        max_model_len=longest_tokens,
        max_adapter_blocks=blocks - -(-longest_tokens // engine.block_size),
        kernels=model.kernels.name,
        assist=assist,
        async_scheduling=graphs is not None,
    )
    return executor, config, sizes


@contextmanager
def _device_errors(device: str) -> Iterator[None]:
    """Let what a device raises, out of memory above all, be an ``ExecutorError``."""
    try:
        yield
    except ExecutorError:
        raise
    except RuntimeError as error:
        raise ExecutorError(f"{device}: {error}") from error
