"""Plans made by hand for a torch executor, with scattered blocks, and what transformers and PEFT say to the same."""

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lorikeet.adapters.store import reference
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.core.plan import (
    KernelForm,
    SequenceStart,
    SequenceStep,
    StepPlan,
    StepResult,
    Tier,
    Token,
    Transfer,
    TransferDone,
)
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.engine.loop import Engine
from lorikeet.memory.packing import pack
from lorikeet.models.config import read_model_config
from lorikeet.worker.torch_executor import TorchExecutor, build_torch_executor
from tests.models.checkpoints import make_checkpoint

BLOCK_TOKENS = 4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SCARCE, AMPLE = 310_000, 4_000_000
"""Bytes: little more than the adapters alone, so that some must go for any KV, whatever the clock says; and plenty."""


def answer(engine: Engine, requests: Sequence[Request]) -> list[StepOutputs]:
    """Submit requests, and step until every one has ended."""
    for request in requests:
        engine.submit(request)
    outputs = []
    while engine.has_requests or engine.is_busy:
        outputs.append(engine.step())
        if not engine.is_busy:
            engine.wait_for_transfer(1.0)
    return outputs


def greedy_requests(refs: Sequence[AdapterRef | None], count: int, max_tokens: int) -> list[Request]:
    """Return requests under adapters in turn; one prefix under every adapter: reuse must not cross them."""
    shared = random_tokens(20, seed=0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Request(
            RequestId(f"r{index}"),
            shared + random_tokens(index, seed=index),
            params,
            arrival_s=0.0,
            adapter=refs[index % len(refs)],
        )
        for index in range(count)
    ]


def check_answers(folder: Path, requests: Sequence[Request], outputs: Sequence[StepOutputs]) -> None:
    """Assert that greedy tokens are those of transformers and PEFT."""
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for output in (output for turn in outputs for output in turn.tokens):
        tokens[output.request_id] += [token.token_id for token in output.tokens]
    for request in requests:
        expected = peer_tokens(folder, request.adapter, request.prompt_token_ids, request.sampling.max_tokens)
        assert tokens[request.request_id] == expected, request.request_id


def fp32_settings(**engine: Any) -> Settings:
    """Small blocks, a small arena, no host tier, one thread, fp32."""
    given = {"block_size": BLOCK_TOKENS, "memory_bytes": 2**20, "host_memory_bytes": 0, "threads": 1, **engine}
    return Settings(ModelSettings(dtype="float32"), EngineSettings(**given), AdapterSettings())


def tight_settings(model_folder: Path, **engine: Any) -> Settings:
    """As :func:`fp32_settings`, for few sequences, in small steps, of a model."""
    settings = fp32_settings(max_num_seqs=8, max_num_batched_tokens=24, num_scheduler_steps=4, **engine)
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, model=str(model_folder)))


class Driver:
    """A scheduler by hand. Sequences and adapters are called by name.

    Args:
        executor: runs the plans.
        sizes: of the executor.
    """

    def __init__(self, executor: TorchExecutor, sizes: EngineSizes) -> None:
        self.executor = executor
        self.sizes = sizes
        self.tokens: dict[str, list[Token]] = {}
        self._free = list(range(sizes.total_blocks))
        random.Random(7).shuffle(self._free)
        self._blocks: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._adapters: dict[str, AdapterDigest | None] = {}
        self._starts: list[SequenceStart] = []
        self._drops: list[RequestId] = []
        self._steps = 0
        self._transfers = itertools.count()

    def load(self, *refs: AdapterRef, wait: bool = True) -> list[TransferDone]:
        """Start loads from the source in an otherwise empty plan; return how each ended."""
        return self.move(*(self.transfer(Tier.SOURCE, Tier.DEVICE, ref) for ref in refs), wait=wait)

    def transfer(
        self, source: Tier, target: Tier, adapter: AdapterRef, host_blocks: tuple[BlockId, ...] = ()
    ) -> Transfer:
        """Return a transfer of an adapter, with device blocks of its own if it needs any."""
        count = self.blocks_of(adapter) if target is Tier.DEVICE else 0
        device_blocks = tuple(BlockId(self._free.pop()) for _ in range(count))
        return Transfer(next(self._transfers), source, target, host_blocks, device_blocks, adapter)

    def copy(self, target: Tier, host_blocks: tuple[BlockId, ...], device_blocks: tuple[BlockId, ...]) -> None:
        """Copy blocks between the tiers, whatever they hold."""
        source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
        (done,) = self.move(Transfer(next(self._transfers), source, target, host_blocks, device_blocks))
        assert done.error is None

    def move(self, *transfers: Transfer, wait: bool = True) -> list[TransferDone]:
        """Start transfers in an otherwise empty plan; return how each ended, in their order."""
        self.execute(StepPlan(self._steps, transfers=transfers))
        return self.wait_for_transfers(len(transfers)) if wait else []

    def wait_for_transfers(self, count: int) -> list[TransferDone]:
        """Return the next ``count`` transfers that end, in the order of their ids."""
        done: list[TransferDone] = []
        while len(done) < count:
            self.executor.wait_for_transfer(60.0)
            done += self.executor.completed_transfers()
        return sorted(done, key=lambda one: one.transfer_id)

    def blocks_of(self, adapter: AdapterRef) -> int:
        """Blocks that an adapter takes."""
        geometry = self.sizes.local_geometry
        return pack(adapter.ranks, geometry, geometry.block_elements(BLOCK_TOKENS), adapter.extras).blocks

    def held_blocks(self) -> tuple[BlockId, ...]:
        """Device blocks that hold an adapter or KV."""
        return tuple(BlockId(block) for block in sorted(set(range(self.sizes.total_blocks)).difference(self._free)))

    def add(
        self,
        name: str,
        prompt: list[int],
        adapter: AdapterRef | None = None,
        outputs: list[int] | None = None,
        **params: Any,
    ) -> None:
        """Start a sequence with the next step; greedy unless told otherwise."""
        given = {"max_tokens": 1000, "temperature": 0.0, **params}
        digest = None if adapter is None else adapter.digest
        token_ids = [*prompt, *(outputs or [])]
        start = SequenceStart(RequestId(name), token_ids, len(prompt), SamplingParams(**given), digest)
        self._starts.append(start)
        self._adapters[name] = digest
        self._lengths[name], self._computed[name], self._blocks[name] = len(token_ids), 0, 0
        self.tokens.setdefault(name, [])

    def drop(self, name: str) -> None:
        """Forget a sequence with the next step. Its blocks are not used again, so that nothing can hide in them."""
        self._drops.append(RequestId(name))

    def step(
        self,
        work: dict[str, int],
        repeat: int = 1,
        max_duration_s: float = 60.0,
        merged: AdapterRef | None = None,
        kernel_form: KernelForm = KernelForm.UNPADDED,
        overlapped: bool = False,
        continues: bool = False,
    ) -> StepResult:
        """Compute so many tokens of each sequence; a sequence that has caught up yields a token."""
        ordered = sorted(work.items(), key=lambda item: self._adapters[item[0]] or "")
        steps = []
        for name, tokens in ordered:
            start = self._computed[name]
            needed = -(-(start + tokens + repeat - 1) // BLOCK_TOKENS) - self._blocks[name]
            new_blocks = tuple(BlockId(self._free.pop()) for _ in range(max(0, needed)))
            self._blocks[name] += len(new_blocks)
            samples = start + tokens == self._lengths[name]
            steps.append(SequenceStep(RequestId(name), start, tokens, new_blocks, samples))
        plan = StepPlan(
            self._steps,
            sequences=tuple(steps),
            starts=tuple(self._starts),
            drops=tuple(self._drops),
            adapters=tuple(dict.fromkeys(d for name, _ in ordered if (d := self._adapters[name]) is not None)),
            kernel_form=kernel_form,
            merged=None if merged is None else merged.digest,
            repeat=repeat,
            max_duration_s=max_duration_s,
            overlapped=overlapped,
            continues=continues,
        )
        result = self.execute(plan)
        for step, sampled in zip(steps, result.tokens, strict=True):
            self.tokens[step.request_id] += sampled
            self._computed[step.request_id] += step.tokens + result.steps_run - 1
            self._lengths[step.request_id] += len(sampled)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan of one's own."""
        self._steps += 1
        self._starts, self._drops = [], []
        return self.executor.execute(plan)

    def decode(self, names: list[str], count: int, repeat: int = 1) -> None:
        """Run ``count`` decode steps, ``repeat`` to a plan."""
        for _ in range(count // repeat):
            self.step(dict.fromkeys(names, 1), repeat)

    def token_ids(self, name: str) -> list[int]:
        """What the sequence has sampled so far."""
        return [token.token_id for token in self.tokens[name]]


@contextmanager
def driving(folder: Path, on_transfer_done: Callable[[], None] = lambda: None, **engine: Any) -> Iterator[Driver]:
    """Build an executor of the checkpoint, and close it at the end."""
    executor, _, sizes = build_torch_executor(fp32_settings(**engine), folder, lambda *_: None, on_transfer_done)
    try:
        yield Driver(executor, sizes)
    finally:
        executor.close()


def make_adapter(model_folder: Path, folder: Path, geometry: ModelGeometry, seed: int, **options: Any) -> AdapterRef:
    """Save an adapter made by PEFT, B not zero."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(str(folder))
    return reference(folder.name, folder, geometry)


@dataclass(frozen=True)
class Models:
    """A tiny model and adapters of several shapes for it."""

    folder: Path
    adapters: dict[str, AdapterRef]


def make_models(folder: Path, **overrides: Any) -> Models:
    """Save them; sizes as in ``tests.models.checkpoints``."""
    make_checkpoint(folder / "base", "llama", **overrides)
    geometry = read_model_config(folder / "base").geometry(4)
    options = {
        "narrow": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "attention": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
        "wide": {"r": 24, "target_modules": ALL, "use_rslora": True, "rank_pattern": {"down_proj": 5}},
    }
    adapters = {
        name: make_adapter(folder / "base", folder / name, geometry, seed, **given)
        for seed, (name, given) in enumerate(options.items())
    }
    return Models(folder / "base", adapters)


def peer_tokens(model_folder: Path, adapter: AdapterRef | None, prompt: list[int], count: int) -> list[int]:
    """What transformers, with PEFT, generates greedily; who asks the same again is told what it was."""
    version = None if adapter is None else (adapter.folder, adapter.digest)
    return list(_peer_tokens(model_folder, version, tuple(prompt), count))


@functools.cache
def _peer_tokens(
    model_folder: Path, version: tuple[str, AdapterDigest] | None, prompt: tuple[int, ...], count: int
) -> tuple[int, ...]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    if version is not None:
        model = PeftModel.from_pretrained(model, version[0])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        generated = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return tuple(generated[0, len(prompt) :].tolist())


def random_tokens(count: int, seed: int, vocab: int = 97) -> list[int]:
    """A prompt."""
    return random.Random(seed).choices(range(vocab), k=count)


class Latch:
    """Counts calls; ``wait`` blocks until there was one."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    def wait(self) -> bool:
        return self._event.wait(60.0)
