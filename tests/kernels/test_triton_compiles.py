"""Triton's compiler accepts every kernel with its launch parameters, for GPUs that this machine lacks.

The interpreter, in which other tests run the kernels, knows no types, no shared memory and no registers. Here steps of
published models go through decoder, decode graphs and backend as when they are served, with tensors that have shapes
and no memory (torch's meta device), so that tiles, warps and specialized numbers are those of the launchers. A launch
ends when its kernel has been compiled. The assembler, ptxas, comes with Triton; neither GPU nor driver is needed.

A process for each target compiles: in pytest's own, kernels are the interpreter's. First all steps are launched, with
nothing compiled, to find which kernels there are; then those are compiled, or a sample of them that has every tile and,
for one target, every value of every constant of every function, unless pytest is told ``--all``.
"""

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial, partialmethod
from itertools import cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lorikeet.config import EngineSettings
from lorikeet.core.geometry import PRODUCTS
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import KernelForm, SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.interface import kv_view
from lorikeet.kernels.lora import LoraWeights
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import StateSequences
from lorikeet.kernels.triton.kernels import TritonKernels
from lorikeet.kernels.triton.launch import INTERPRETED
from lorikeet.models.config import read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import WeightLayout
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.profiling.model_shapes import MODEL_SHAPES
from lorikeet.worker.batch import BatchRow, RankSequence, build_batch, lora_batch
from lorikeet.worker.decode_graphs import DecodeGraphs
from lorikeet.worker.memory_profiling import EagerDevice, compile_kernels
from lorikeet.worker.rank_setup import RankModel
from tests.support import sampling
from tests.support.sampling import sample

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/lorikeet/kernels/triton").glob("*.py"))

SHARED_KIB = {89: 99, 90: 227}
"""Shared memory that a program may have, by target (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"): of the L4 and the RTX 40, and of the H100. A launch with more is refused. The A100 and the A10 take what
the first does, and have as much or more of it.
"""
TARGETS = tuple(SHARED_KIB) if sampling.runs_all else (min(SHARED_KIB),)
"""Of a sample, the one that refuses most."""
REGISTERS = 65536
"""Of a multiprocessor: a launch whose threads need more is refused."""
PROGRAMS = (2**31 - 1, 65535, 65535)
"""Of a launch each way at most."""

FEW_BYTES = 64
SPILLS = {89: {"expand of 64 rows, bf16": 320}, 90: {"attention of 16 rows, fp32": 512}}
"""Bytes that a thread of a kernel may put out of its registers: a few, or more where it is known. Tiles were chosen by
what an H100 took for them.
"""

META = torch.device("meta")
BLOCK_TOKENS = 16
MAX_SEGMENT_ROWS = 64
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
"""The default model, SmolLM2-135M."""
OPEN_LLAMA_3B = SMOLLM2 | {
    "hidden_size": 3200,
    "intermediate_size": 8640,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""Heads of 100: no power of two."""
SHAPES = {**MODEL_SHAPES, "smollm2-135m": SMOLLM2, "open-llama-3b": OPEN_LLAMA_3B}


class Kernel(msgspec.Struct):
    """A kernel as it was compiled, or why it was not.

    Attributes:
        name: of the function.
        tile: the same with the rows that a program has, if it is told, and the type of the numbers it reads.
        constants: by which kernels of this name differ, and tiles on their way at a time.
        error: of the compiler; if it is not empty, the rest is not known.
        code_bytes: what was compiled.
        warps: of a program.
        shared: memory of a program in bytes.
        registers: of a thread.
        spilled: bytes that a thread writes because registers do not suffice, or reads again if that is more.
        programs: each way, the most of any launch.
        steps: that launch it.
    """

    name: str
    tile: str
    constants: str = ""
    error: str = ""
    code_bytes: int = 0
    warps: int = 0
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    programs: tuple[int, ...] = (1, 1, 1)
    steps: list[str] = []

    def faults(self, target: int) -> list[str]:
        """Return why it cannot be launched on a target, or is slower than it looks; known spills are left out."""
        if self.error:
            return [self.error]
        found = [] if self.code_bytes else ["has no code"]
        kib = self.shared / 1024
        most = SHARED_KIB[target]
        if kib > most:
            found.append(f"wants {kib:.1f} KiB of shared memory, there are {most}")
        if self.registers * 32 * self.warps > REGISTERS:
            found.append(f"wants {self.registers} registers for each thread of {self.warps} warps")
        if self.spilled > SPILLS[target].get(self.tile, FEW_BYTES):
            found.append(f"spills {self.spilled} bytes of registers")
        if any(count > limit for count, limit in zip(self.programs, PROGRAMS, strict=True)):
            found.append(f"has too many programs: {self.programs}")
        return found


class Compiled(msgspec.Struct):
    """What a process compiled.

    Attributes:
        launched: names of all functions that steps launched.
        kernels: that were compiled of those that steps launched.
        late: kernels that steps of a model launched and its start had not, each with the first step.
        wrong: kernels that are meant to be.
    """

    launched: set[str]
    kernels: list[Kernel]
    late: list[str]
    wrong: list[Kernel]


def described(kernels: Iterable[Kernel], target: int) -> list[str]:
    """Return a line for each fault."""
    return [
        f"{kernel.tile} ({kernel.constants}), of {'; '.join(kernel.steps)}: {fault}"
        for kernel in kernels
        for fault in kernel.faults(target)
    ]


class Launch(msgspec.Struct):
    """A kernel as it is launched the first time.

    Attributes:
        compile: compiles it.
        name: of the function.
        tile: as of ``Kernel``.
        constants: arguments by which kernels of this name differ, and how it is to be compiled.
        programs: each way, the most of any launch.
        steps: that launch it.
    """

    compile: Callable[[], Kernel]
    name: str
    tile: str
    constants: dict[str, object]
    programs: tuple[int, ...] = (1, 1, 1)
    steps: list[str] = []

    def features(self, target: int) -> list[tuple[str, str, object]]:
        """Return what a sample must have: tiles, and all kernels of tiles known to spill.

        On the target with the least shared memory, which refuses most, also every constant of a function.
        """
        found: list[tuple[str, str, object]] = [("", "tile", self.tile)]
        if target == min(SHARED_KIB):
            found += [(self.name, name, value) for name, value in self.constants.items()]
        if self.tile in SPILLS[target]:
            found.append((self.tile, "all", str(self.constants)))
        return found

    def compiled(self) -> Kernel:
        """Compile it."""
        kernel = self.compile()
        kernel.programs = self.programs
        kernel.steps = self.steps
        return kernel


class Launches:
    """Stands where Triton looks for its driver, and has launches end when it is known which kernel they need.

    Args:
        target: compute capability, times ten.

    Attributes:
        step: at work.
        kernels: that were launched, by what Triton tells them apart by.
    """

    def __init__(self, target: int) -> None:
        self._target = GPUTarget("cuda", target, 32)
        self.kernels: dict[tuple[object, ...], Launch] = {}
        self.step = ""

    def get_current_target(self) -> GPUTarget:
        """The one that is not there."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """None is needed."""
        return 0

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Let it see what is launched meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", partialmethod(_launch, self, JITFunction.run))
            patch.setattr(JITFunction, "_do_compile", partialmethod(_needed, self, JITFunction._do_compile))
            triton.runtime.driver.set_active(self)
            yield

    def launch(
        self, run: Callable[..., Any], function: Any, *arguments: Any, grid: tuple[int, ...], **options: Any
    ) -> None:
        """Note which kernel is needed for these arguments; ``run`` is Triton's launch."""
        assert run(function, *arguments, grid=grid, **options | {"warmup": True}) is None, "it has been compiled"
        launch = self.kernels[self._last]
        launch.programs = tuple(map(max, launch.programs, (*grid, 1, 1)))
        if self.step not in launch.steps:
            launch.steps.append(self.step)

    def needed(self, do_compile: Callable[..., Any], function: Any, key: str, *arguments: Any) -> None:
        """Note a kernel; ``do_compile`` is how Triton compiles it."""
        signature, _, constants, options = arguments[:4]
        self._last = (function.__name__, key)
        named = {function.arg_names[path[0]]: value for path, value in constants.items()}
        chosen = {"stages": options.num_stages, "warps": options.num_warps}

        def compile_it() -> Kernel:
            printed = io.StringIO()
            try:
                with redirect_stdout(printed):  # Triton has been asked to print what ptxas tells of registers
                    compiled = do_compile(function, key, *arguments)
            except Exception as error:  # each stage of the compiler has its own
                text = " ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())
                return Kernel(function.__name__, function.__name__, error=text)
            return _kernel(function, compiled, printed.getvalue())

        launch = Launch(compile_it, function.__name__, _tile(function, named, signature), named | chosen)
        self.kernels.setdefault(self._last, launch)


def _tile(function: Any, constants: dict[str, object], signature: dict[str, str]) -> str:
    rows = f" of {constants['ROWS']} rows" if "ROWS" in constants else ""
    pointers = {name: kind.lstrip("*") for name, kind in signature.items() if kind.startswith("*")}
    reads = pointers["out"] if function.__name__.startswith("expand") else next(iter(pointers.values()))
    return f"{function.__name__}{rows}, {reads}"


def _kernel(function: Any, compiled: Any, log: str) -> Kernel:
    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)))

    made = compiled.metadata
    source = compiled.src
    constants = {function.arg_names[path[0]]: value for path, value in source.constants.items()}
    return Kernel(
        function.__name__,
        tile=_tile(function, constants, source.signature),
        constants=", ".join(f"{name}={value}" for name, value in (constants | {"stages": made.num_stages}).items()),
        code_bytes=len(compiled.asm["cubin"]),
        warps=made.num_warps,
        shared=made.shared,
        registers=largest(r"Used (\d+) registers"),
        spilled=largest(r"(\d+) bytes spill (?:stores|loads)"),
    )


class _Adapters(dict[AdapterDigest, LoraWeights]):
    """Those that are asked for, by names such as ``all16.3``: modules, rank, and a number to tell them apart.

    Of ``odd`` ones, which have the modules of ``qv``, no address is a multiple of 16.
    """

    def __init__(self, model: RankModel) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, name: AdapterDigest) -> LoraWeights:
        modules, rank = re.findall("[a-z]+|[0-9]+", name)[:2]
        layers = range(self._model.config.layers)
        shapes = self._model.geometry.modules

        def rows(width: int) -> Tensor:
            return torch.empty(int(rank), width, dtype=self._model.dtype, device=META)

        pieces = {
            (layer, module): ((rows(shape.in_features), rows(shape.out_features)),)
            for layer, (module, shape) in product(layers, shapes.items())
            if modules == "all" or module in ("q", "v")
        }
        self[name] = made = LoraWeights(pieces, len(layers))
        made.table[:, :2] += modules == "odd"
        return made


class _Model:
    """Two layers of a model: the last one differs from the others. Its methods are steps.

    Args:
        launches: sees what they launch.
        name: one of ``SHAPES``.
        dtype: of weights, adapters and KV.
        bits: of the linear weights, if they are quantised: symmetric in 8 bits, with offsets and wide scales in 4.
    """

    def __init__(self, launches: Launches, name: str, dtype: torch.dtype, bits: int = 0) -> None:
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SHAPES[name] | {"num_hidden_layers": 2}))
            config = read_model_config(Path(folder))
        kernels = TritonKernels()
        geometry = config.geometry(dtype.itemsize)
        weights = WeightLayout(config, dtype, META, 0, 1).weights
        if bits:
            products = [
                {product: _quantized(getattr(layer, product), bits) for product in PRODUCTS} for layer in weights.layers
            ]
            layers = tuple(replace(layer, **each) for layer, each in zip(weights.layers, products, strict=True))
            weights = replace(weights, layers=layers, lm_head=_quantized(weights.lm_head, 8))
        decoder = Decoder(config, weights, kernels, SingleRankGroup())
        arena = torch.empty(64, geometry.block_elements(BLOCK_TOKENS), dtype=dtype, device=META)
        self._kv = kv_view(arena, geometry.layers, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim)
        self._model = RankModel(config, decoder, kernels, dtype, META, geometry)
        self._adapters = _Adapters(self._model)
        self._launches = launches
        self._longest = config.context_tokens
        self._name = f"{name} {str(dtype).removeprefix('torch.')}"

    def start(self) -> None:
        """The steps before there are requests."""
        self._launches.step = f"{self._name} start"
        compile_kernels(self._model, EngineSettings(max_num_seqs=MAX_SEGMENT_ROWS), 128, self._longest)

    def decode(self, count: int, *adapters: str, context: int = 500, form: KernelForm = KernelForm.UNPADDED) -> None:
        """A step of a graph: so many sequences, with the adapters one after another; ``*`` is one for each."""
        self._launches.step = f"{self._name} decode of {count} {' '.join(adapters)}".rstrip()
        names = [name.replace("*", str(i)) for i, name in enumerate(islice(cycle(adapters or ("",)), count))]
        rows = self._rows([(1, context, name) for name in sorted(names)])
        device: Any = EagerDevice()
        blocks = self._model.config.context_tokens // BLOCK_TOKENS
        graphs = DecodeGraphs(device, self._model, self._kv, MAX_SEGMENT_ROWS, blocks)
        graphs.start(rows, lora_batch(rows, self._adapters, form), _choices(count))
        graphs.close()

    def call(self, *sequences: tuple[int, int, str], form: KernelForm = KernelForm.UNPADDED) -> None:
        """A step that is no graph: of each sequence the rows, the tokens with these, and the adapter, if any."""
        what = ", ".join(f"{rows} of {tokens} {name}".rstrip() for rows, tokens, name in sequences)
        self._launches.step = f"{self._name} {form} rows {what}"
        batch = build_batch(self._rows(sequences), self._adapters, BLOCK_TOKENS, META, form)
        logits = self._model.decoder.forward(batch, self._kv)
        self._model.kernels.choose(logits, _choices(len(logits)).on(META))

    def edit(self, count: int) -> None:
        """Choose tokens by logits that were edited, which are floats."""
        self._launches.step = f"{self._name} edited logits of {count}"
        logits = torch.empty(count, self._model.config.vocab_size, device=META)
        self._model.kernels.choose(logits, _choices(count).on(META))

    def _rows(self, sequences: Sequence[tuple[int, int, str]]) -> list[BatchRow]:
        made = []
        for number, (rows, tokens, name) in enumerate(sequences):
            adapter = AdapterDigest(name) if name else None
            start = SequenceStart(RequestId(str(number)), [0] * tokens, tokens, SamplingParams(1), adapter)
            sequence = RankSequence(start)
            sequence.add_blocks(map(BlockId, range(-(-tokens // BLOCK_TOKENS))))
            made.append(BatchRow(sequence, tokens - rows, rows, samples=True))
        return made


def _quantized(weight: Any, bits: int) -> QuantizedWeight:
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8, device=META)
    kind = torch.float16 if bits == 8 else torch.float32
    scales = torch.empty(outputs, -(-inputs // 32), dtype=kind, device=META)
    return QuantizedWeight(bits, inputs, 32, 128 * (bits == 8), codes, scales, None if bits == 8 else scales)


def _choices(rows: int) -> SamplingTensors:
    floats = torch.zeros(rows)
    ints = torch.zeros(rows, dtype=torch.int64)
    return SamplingTensors(floats, ints, floats, floats, ints, ints)


def serve_after_start(launches: Launches) -> list[str]:
    """Start with a model, run steps of all kinds, and return what they had to wait for."""
    model = _Model(launches, "llama-3-8b", torch.bfloat16)
    model.start()
    started = len(launches.kernels)
    for count in (1, 2, 3, 8, 20, 33, 64):
        model.decode(count)
        for rank in (8, 16, 64, 128):
            model.decode(count, f"all{rank}.*")
            model.decode(count, f"qv{rank}.0")
            model.decode(count, *(f"all{rank}.{i}" for i in range(max(1, count - 1))))
            model.decode(count, *(f"all{rank}.{i}" for i in range(3)))
    for tokens in (3, 20, 100, 512):
        model.call((tokens, tokens, ""))
        for rank in (8, 16, 32, 64, 128):
            model.call((tokens, tokens, f"all{rank}.0"))
            model.call((tokens, tokens, f"all{rank}.0"), (1, 900, f"all{rank}.1"), (1, 800, ""))
    for others, rank in product((4, 11, 22, 44), (8, 128)):
        model.call((17, 17, f"all{rank}.0"), *((1, 900, f"all{rank}.{i + 1}") for i in range(others)))
    model.edit(3)
    model.decode(5, context=8000)
    late = islice(launches.kernels.values(), started, None)
    return [f"{launch.name} {launch.constants}, of {launch.steps[0]}" for launch in late]


def serve(launches: Launches) -> None:
    """Run steps of models of several kinds, which launch every kernel: with its largest tiles, and smaller ones."""
    llama = _Model(launches, "llama-2-7b", torch.bfloat16)
    llama.decode(1)
    llama.decode(1, "all16.0")
    llama.decode(32, "all16.*")
    llama.decode(32, "all16.0", "all64.0", form=KernelForm.PADDED)
    llama.call((512, 512, ""))
    llama.call((512, 512, "all16.0"))
    llama.call((512, 512, "all64.0"))
    llama.call(*((1024, 1024, f"all{rank}.0") for rank in (64, 32, 16, 8)), form=KernelForm.PADDED)
    llama.call((12, 12, "all16.0"), (9, 700, "all8.0"))
    llama.call((512, 512, "all64.0"), (1, 1000, "all16.0"), (1, 900, ""))
    llama.call((512, 512, "all64.0"), (1, 1000, "all16.0"), form=KernelForm.EINSUM)
    grouped = _Model(launches, "llama-3-8b", torch.bfloat16)
    grouped.decode(1, "all16.0")
    grouped.decode(64, "qv16.*")
    grouped.call((4096, 4096, "all64.0"))
    grouped.call((12, 12, ""))
    normed = _Model(launches, "qwen3-8b", torch.bfloat16)
    normed.decode(16, context=9000)
    small = _Model(launches, "smollm2-135m", torch.bfloat16)
    small.decode(1, "qv16.0")
    small.call((200, 200, "qv64.0"))
    small.decode(1, "odd16.0")
    small.call((12, 12, "odd16.0"))
    small.call((100, 100, "odd16.0"))
    uneven = _Model(launches, "open-llama-3b", torch.bfloat16)
    uneven.decode(1)
    uneven.call((100, 100, ""))
    exact = _Model(launches, "smollm2-135m", torch.float32)
    exact.decode(1, "qv16.0")
    exact.decode(64, "qv16.*")
    exact.decode(32, "qv16.0", "qv64.0")
    exact.call((12, 12, "qv16.0"))
    for bits in (8, 4):
        quantised = _Model(launches, "llama-3-8b", torch.bfloat16, bits)
        quantised.decode(1)
        quantised.decode(64, "all16.0")
        quantised.call((512, 512, ""))
    quantised = _Model(launches, "smollm2-135m", torch.float32, 4)
    quantised.decode(1)
    quantised.call((512, 512, ""))
    large = _Model(launches, "llama-2-7b", torch.float32)
    large.decode(1)
    large.call((512, 512, "qv64.0"))
    serve_states(launches)


def serve_states(launches: Launches) -> None:
    """Run layers with a state, in the shapes of Qwen3.5 and of Granite 4: decodes, prefills, and both."""
    kernels = TritonKernels()
    for name, key_heads, heads, key_dim, value_dim, is_delta in (
        ("qwen3.5", 16, 32, 128, 128, True),
        ("granite-4", 1, 48, 128, 64, False),
    ):
        for dtype, rows in product((torch.bfloat16, torch.float32), ((1,), (1, 100))):
            launches.step = f"{name} {str(dtype).removeprefix('torch.')} states of {rows} rows"
            total = sum(rows)
            channels = 2 * key_heads * key_dim + heads * value_dim
            starts = torch.tensor([0, *rows]).cumsum(0)
            sequences = StateSequences(starts.to(META), torch.ones(len(rows), dtype=torch.int64, device=META), starts)
            x = torch.empty(total, channels, dtype=dtype, device=META)
            floats = torch.empty(total, heads, device=META)
            bias = None if is_delta else torch.empty(channels, dtype=dtype, device=META)
            weight = torch.empty(4, channels, dtype=dtype, device=META)
            states = torch.empty(1 << 20, device=META)
            parts = torch.empty(len(rows), heads, dtype=torch.int64, device=META)
            mixed = kernels.causal_conv(x, weight, bias, states, parts[:, :1].contiguous(), sequences, has_silu=True)
            keys = key_heads * key_dim
            q, k, v = mixed.split([keys, keys, heads * value_dim], dim=1)
            skip = None if is_delta else floats[0]
            found = kernels.recurrence(
                *(each.unflatten(1, (-1, key_dim)) for each in (q, k)), v.unflatten(1, (-1, value_dim)),
                floats, floats, states, parts, sequences, skip, is_delta=is_delta,
            ).flatten(1)  # fmt: skip
            group = value_dim if is_delta else heads * value_dim
            factors = torch.empty(group, dtype=dtype, device=META)
            kernels.gated_norm(found, found, factors, 1e-6, group, is_norm_first=is_delta)


@triton.jit  # type: ignore[untyped-decorator]
def changes_type(out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sum that begins as a whole number, and does not remain one."""
    total = 0
    for each in range(COUNT):
        total += each * 0.5  # type: ignore[assignment]
    tl.store(out, total)


@triton.jit  # type: ignore[untyped-decorator]
def fills_memory(x, out, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of many tiles that are on their way at a time."""
    lane = tl.arange(0, WIDTH)
    place = lane[:, None] * WIDTH + lane[None, :]
    sums = tl.zeros([WIDTH, WIDTH], tl.float32)
    for each in range(count):
        left = tl.load(x + 2 * each * WIDTH * WIDTH + place)
        right = tl.load(x + (2 * each + 1) * WIDTH * WIDTH + place)
        sums += tl.dot(left, right)
    tl.store(out + place, sums)


@triton.jit  # type: ignore[untyped-decorator]
def fills_registers(x, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """More numbers than the threads of a warp can hold, all of which are needed twice."""
    lane = tl.arange(0, WIDTH)
    value = tl.load(x + lane)
    tl.store(out + lane, value - tl.sum(value, axis=0))


def launch_wrong(place: torch.device) -> list[Tensor]:
    """Launch kernels that the interpreter takes; return what they wrote."""
    whole, tiles, wide = (torch.empty(size, device=place) for size in (1, 128 * 128, 16384))
    changes_type[(1,)](whole, 4)
    fills_memory[(1,)](torch.ones(4 * 128 * 128, device=place), tiles, 2, 128, num_warps=8, num_stages=6)
    fills_registers[(1,)](torch.ones(16384, device=place), wide, 16384, num_warps=1)
    return [whole, tiles, wide]


def compile_all(target: int, written: Path, *, sampled: bool) -> None:
    """Compile for a target in this process, which has not imported the kernels for the interpreter."""
    assert not INTERPRETED
    ours = Launches(target)
    wrong = Launches(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: divmod(target, 10))
        with ours.launching():
            late = serve_after_start(ours)
            serve(ours)
        with wrong.launching():
            launch_wrong(META)
        launched = [*ours.kernels.values()]
        chosen = sample(launched, [each.features(target) for each in launched]) if sampled else launched
        kernels, bad = ([each.compiled() for each in some] for some in (chosen, wrong.kernels.values()))
    written.write_bytes(msgspec.json.encode(Compiled({each.name for each in launched}, kernels, late, bad)))


def _launch(function: Any, launches: Launches, run: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    launches.launch(run, function, *arguments, **options)


def _needed(function: Any, launches: Launches, do_compile: Callable[..., Any], *arguments: Any) -> None:
    launches.needed(do_compile, function, *arguments)


def kernels_of(*modules: str) -> set[str]:
    """Return the functions in modules' sources that Triton compiles and none of them calls: those that are launched."""
    functions = {
        node.name: node
        for module in modules
        for node in ast.parse(module).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    called = {
        node.func.id
        for function in functions.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return functions.keys() - called


@pytest.fixture(scope="module", params=TARGETS, ids="sm_{}".format)
def target(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def all_compiled(pytestconfig: pytest.Config) -> dict[int, Compiled]:
    """What was compiled for each target, in processes beside each other."""
    compile_for = partial(compiled_for, sampled=not pytestconfig.getoption("--all"))
    with ThreadPoolExecutor(len(TARGETS)) as pool:
        return dict(zip(TARGETS, pool.map(compile_for, TARGETS), strict=True))


@pytest.fixture(scope="module")
def compiled(target: int, all_compiled: dict[int, Compiled]) -> Compiled:
    return all_compiled[target]


def compiled_for(target: int, *, sampled: bool) -> Compiled:
    with TemporaryDirectory() as folder:
        written = Path(folder, "compiled.json")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | {
            "TRITON_CACHE_DIR": folder,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.kernels.test_triton_compiles", str(target), str(written)]
        command += ["sampled"] if sampled else []
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(written.read_bytes(), type=Compiled)


def test_every_kernel_compiles_and_can_be_launched(target: int, compiled: Compiled) -> None:
    assert described(compiled.kernels, target) == []


def test_no_request_waits_for_a_kernel_to_be_compiled(compiled: Compiled) -> None:
    assert compiled.late == []


def test_no_kernel_is_forgotten(compiled: Compiled) -> None:
    launched = "@triton.jit\ndef two(x): each(x)"
    called = "@triton.jit(noinline=True)\ndef each(x): pass"
    assert kernels_of(launched, called, "def of_python(): each(1)") == {"two"}
    ours = kernels_of(*(source.read_text() for source in SOURCES))
    assert ours == compiled.launched == {kernel.name for kernel in compiled.kernels}


def test_no_spill_is_allowed_that_has_been_mended(target: int, compiled: Compiled) -> None:
    assert {kernel.tile for kernel in compiled.kernels if kernel.spilled > FEW_BYTES} == SPILLS[target].keys()


def test_wrong_kernels_that_the_interpreter_takes_are_found_out(target: int, compiled: Compiled) -> None:
    (of_type,), (of_memory,), (of_registers,) = (kernel.faults(target) for kernel in compiled.wrong)
    assert "total has initial type int32 but is re-assigned to fp32" in of_type
    assert "shared memory" in of_memory
    assert "spills" in of_registers
    if INTERPRETED:
        assert [float(wrote.mean()) for wrote in launch_wrong(torch.device("cpu"))] == [3, 256, 1 - 16384]


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), Path(sys.argv[2]), sampled="sampled" in sys.argv[3:])
