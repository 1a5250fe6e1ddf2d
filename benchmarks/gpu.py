"""Measures the engine on a GPU, with the shape of Llama-2-7B and dummy weights: ``python -m benchmarks.gpu``.

Parts, each a table; all but ``host`` need an NVIDIA GPU:

* ``limits``: rates of the GPU: copies within its memory, a large product in bfloat16, copies from the host.
* ``steps``: decodes and a prefill beside these limits. A decode reads weights, its adapters and its KV; a prefill's
  attention is free in its limit.
* ``adapters``: time that adapters add to a decode and to a prefill, compared with the same step of the base model just
  before or after, beside the time of reading each adapter once.
* ``loads``: an adapter of rank 64 a second beside decodes.
* ``cold``: TTFT of a request whose adapter is on the host, by preset.
* ``host``: time that the host adds to a GPU's time, measured without a GPU: the real engine runs on a device that
  computes nothing. A copy ends when a link of the given speed would have finished it, and a step after a given time. On
  a GPU a kernel launch takes the host some microseconds, which this part does not count.
"""

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import make_requests, print_setup, print_table, run_all
from benchmarks.kernels import spread
from benchmarks.memory_bench import fill_host, settle
from benchmarks.steps import DECODES as LOAD_DECODES
from benchmarks.steps import measure_loads, twins
from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import Executor
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.engine.build import Replica, build_replica
from lorikeet.kernels.interface import Batch
from lorikeet.kernels.lora import LoraBatch
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.profiling.machine_limits import model_cost
from lorikeet.profiling.model_shapes import write_model_shape
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.transfer.device import BlockCopy, Cuda, StreamEvent
from lorikeet.workloads.random_adapters import spread_ranks, write_random_adapter
from lorikeet.workloads.synthetic import ATTENTION

SHAPE = "llama-2-7b"
PRESET = "lorikeet:plain-no-reuse"
ADAPTERS = 100
STEPS = 64
LOADED_RANK = 64
LOADS = 12
DECODES = ((1, 1024), (32, 1024), (128, 256))
"""Rows and tokens of their prompts."""
PREFILL_TOKENS = 8192
PREFILL_SEQUENCES = 4
PREFILLS = 6
LORA = ((8, 8, 16), (100, 100, 16), (8, 32, 1024), (100, 100, 256))
"""Distinct adapters, rows and tokens of their prompts."""
COLD_RANKS = (32, 64, 128)
COLD_TOKENS = (64, 512)
COLD_REPEATS = 5
COLD_PRESETS = ("cached", "toppings:on-demand", "toppings", "lorikeet:assist", "toppings:strawman")
GIB = 2**30
_COPY_BYTES = 2**30
_LINK_BYTES = 2**28
_GEMM = (8192, 4096, 11008)
"""Rows, inputs and outputs: a prefill's largest product."""


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    parser.add_argument("--decode-ms", type=float, default=6.5, help="host: of a step in which all decode")
    parser.add_argument("--called-ms", type=float, default=10.0, help="host: of any other step")
    parser.add_argument("--link-gb-s", type=float, default=55.0, help="host: of copies from the host")
    options = parser.parse_args()
    print_setup()
    for name in options.parts.split(","):
        if name == "host":
            host(TimedDevice(options.decode_ms / 1e3, options.called_ms / 1e3, options.link_gb_s * 1e9))
        elif torch.cuda.is_available():
            with tempfile.TemporaryDirectory(prefix="lorikeet-gpu-") as scratch:
                PARTS[name](Rig(Path(scratch)))
        else:
            print(f"{name}: torch sees no CUDA device here\n")


# --- what the GPU can do -----------------------------------------------------------------------------


class Limits(NamedTuple):
    """Holds the rates of a copy within the GPU's memory (read and write), a large product, and a host copy."""

    copy_bytes_per_s: float
    gemm_flops: float
    link_bytes_per_s: float


def measure_limits() -> Limits:
    """Measure the limits; each is a median of many runs."""
    from triton.testing import do_bench  # the import needs a GPU

    place = torch.device("cuda")
    source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=place) for _ in range(2))
    rows, inputs, outputs = _GEMM
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=place)
    weight = torch.randn(inputs, outputs, dtype=torch.bfloat16, device=place)
    host_memory = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, return_mode="median")) / 1e3

    return Limits(
        copy_bytes_per_s=2 * _COPY_BYTES / seconds(lambda: target.copy_(source)),
        gemm_flops=2 * rows * inputs * outputs / seconds(lambda: x @ weight),
        link_bytes_per_s=_LINK_BYTES / seconds(lambda: target[:_LINK_BYTES].copy_(host_memory, non_blocking=True)),
    )


def limits(rig: "Rig") -> None:
    """Print the limits and the name of the GPU."""
    found = measure_limits()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    rows = [
        ["copy in its memory, read and written", f"{found.copy_bytes_per_s / 1e9:,.0f} GB/s"],
        ["product in bfloat16", f"{found.gemm_flops / 1e12:,.0f} TFLOP/s"],
        ["copy from the host", f"{found.link_bytes_per_s / 1e9:.1f} GB/s"],
    ]
    print_table(f"{torch.cuda.get_device_name()}, driver {driver}", ["limit", "measured"], rows)


# --- engines -----------------------------------------------------------------------------------------


class Rig:
    """Builds engines of one shape with dummy weights, and adapters for them.

    Args:
        folder: folder for the config and the adapters.
        shape: name of the model's shape.
        engine: settings of all engines, which override those of a part.
    """

    def __init__(self, folder: Path, shape: str = SHAPE, **engine: object) -> None:
        self._folder = folder
        # Steps with drafts are not plain decodes.
        self._engine: dict[str, Any] = {"device": "cuda", "draft_tokens": 0} | engine
        self.model = write_model_shape(folder / shape, shape)
        self.config: ModelConfig = read_model_config(self.model)

    def settings(self, **engine: object) -> Settings:
        """Return settings; ``engine`` are engine settings."""
        model = ModelSettings(model=str(self.model), dtype="bfloat16", load_format="dummy")
        return Settings(model, EngineSettings(**(engine | self._engine)))  # type: ignore[arg-type]

    @contextmanager
    def replica(self, on_load_done: Callable[[], None] = lambda: None, **engine: object) -> Iterator[Replica]:
        """Build an engine and close it at the end."""
        built = build_replica(self.settings(**engine), on_load_done=on_load_done)
        with closing(built.engine):
            yield built

    def adapters(self, name: str, ranks: Sequence[int], modules: Sequence[str] = ATTENTION) -> list[AdapterRef]:
        """Return adapters with these ranks, in bfloat16, written by threads: a process that uses CUDA does not fork."""
        geometry = self.config.geometry(2)
        write = partial(write_random_adapter, modules=tuple(modules), dtype=torch.bfloat16)
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(write, self._folder / f"{name}{i}", geometry, rank, seed=i) for i, rank in enumerate(ranks)
            ]
            return [reference(job.result().name, job.result(), geometry) for job in jobs]

    def adapter_bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of adapters with these ranks."""
        return 2 * sum(model_cost(self.config, 2, ranks, ATTENTION).adapter_parameters)

    @contextmanager
    def loaded(self) -> Iterator[tuple[Replica, list[int], list[AdapterRef]]]:
        """Yield an engine that holds a hundred adapters, their ranks and the adapters."""
        ranks = spread_ranks(ADAPTERS)
        refs = self.adapters("a", ranks)
        with self.replica(
            preset=PRESET, max_num_seqs=128, max_num_batched_tokens=PREFILL_TOKENS, host_memory_bytes=14 * GIB
        ) as built:
            fill_host(built.engine, tuple(refs))
            run_all(built, make_requests("load", ADAPTERS, 4, 1, refs))
            yield built, ranks, refs


class _RecordingExecutor:
    """Runs plans with another executor and records them with their results."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.ran: list[tuple[StepPlan, StepResult]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it."""
        result = self._inner.execute(plan)
        self.ran.append((plan, result))
        return result

    def decode_s(self, rows: int) -> list[float]:
        """Return the seconds of a step for each plan that only decodes the given number of sequences."""
        return [
            result.duration_s / result.steps_run
            for plan, result in self.ran
            if len(plan.sequences) == rows and all(step.tokens == 1 and step.start > 0 for step in plan.sequences)
        ]

    def prefill_s(self, tokens: int) -> list[float]:
        """Return the seconds of each step that prefills the given number of tokens."""
        return [result.duration_s for plan, result in self.ran if sum(step.tokens for step in plan.sequences) == tokens]


@contextmanager
def _recording(built: Replica) -> Iterator[_RecordingExecutor]:
    executor = _RecordingExecutor(built.engine._executor)
    with mock.patch.object(built.engine, "_executor", executor):
        yield executor


def steps(rig: Rig) -> None:
    """Print decodes and a prefill beside the limits."""
    found = measure_limits()
    cost = model_cost(rig.config, 2)
    token_bytes = rig.config.geometry(2).block_bytes(1)
    table = []
    with rig.loaded() as (built, ranks, refs):
        for rows, context in DECODES:
            places = spread(ADAPTERS, min(rows, ADAPTERS))
            own = [refs[i] for i in places]
            run_all(built, make_requests(f"warm-{rows}", rows, 8, STEPS, own))
            with _recording(built) as executor:
                run_all(built, make_requests(f"decode-{rows}", rows, context, STEPS, own))
            read = 2 * cost.parameters + rig.adapter_bytes([ranks[i] for i in places])
            read += rows * (context + STEPS // 2) * token_bytes
            table.append(
                _beside(f"decode, {rows} rows at {context}", read / found.copy_bytes_per_s, executor.decode_s(rows))
            )
        with _recording(built) as executor:
            for turn in range(PREFILLS):
                work = (PREFILL_SEQUENCES, PREFILL_TOKENS // PREFILL_SEQUENCES, 1)
                run_all(built, make_requests(f"prefill-{turn}", *work, seed=turn))
        least_s = 2 * cost.layer_parameters * PREFILL_TOKENS / found.gemm_flops
        table.append(_beside(f"prefill, {PREFILL_TOKENS:,} tokens", least_s, executor.prefill_s(PREFILL_TOKENS)[1:]))
    print_table(f"Steps of {SHAPE}", ["step", "ms", "limit, ms", "of the limit"], table)


def _beside(name: str, least_s: float, seconds: Sequence[float]) -> list[str]:
    took_s = median(seconds)
    return [name, f"{took_s * 1e3:.2f}", f"{least_s * 1e3:.2f}", f"{least_s / took_s:.0%}"]


def adapters(rig: Rig) -> None:
    """Print the time that adapters add to a decode and to a prefill."""
    bandwidth = measure_limits().copy_bytes_per_s
    table = []
    with rig.loaded() as (built, ranks, refs):
        for distinct, rows, context in LORA:
            places = spread(ADAPTERS, distinct)
            with twins(built) as executor:
                asked = make_requests(f"lora-{distinct}-{context}", rows, context, STEPS, [refs[i] for i in places])
                run_all(built, asked)
            pairs = executor.decodes[len(executor.decodes) // 4 :]  # graphs are captured in the first run
            least_s = rig.adapter_bytes([ranks[i] for i in places]) / bandwidth
            added = f"decode, {distinct} adapters on {rows} rows at {context}"
            table.append(_added(added, [pair.adapters_s - pair.base_s for pair in pairs], least_s, pairs))
        few = [refs[i] for i in spread(ADAPTERS, PREFILL_SEQUENCES)]
        with twins(built) as executor:
            for turn in range(PREFILLS):
                work = (PREFILL_SEQUENCES, PREFILL_TOKENS // PREFILL_SEQUENCES, 1)
                run_all(built, make_requests(f"prefill-{turn}", *work, few, seed=turn))
        pairs = executor.prefills[1:]
        added = f"prefill, {PREFILL_SEQUENCES} adapters on {PREFILL_TOKENS:,} tokens"
        table.append(_added(added, [pair.adapters_s - pair.base_s for pair in pairs], 0.0, pairs))
    headings = ["step", "added, ms", "times the least", "of the base's step"]
    print_table("What adapters add", headings, table)


def _added(name: str, added_s: Sequence[float], least_s: float, pairs: Sequence[Any]) -> list[str]:
    times = f"{median(added_s) / least_s:.2f}" if least_s else ""
    share = median(pair.adapters_s / pair.base_s - 1 for pair in pairs)
    return [name, f"{median(added_s) * 1e3:.2f}", times, f"+{share:.1%}"]


def loads(rig: Rig) -> None:
    """Print the time of loads beside the link's, and of steps during loads."""
    link = measure_limits().link_bytes_per_s
    refs = rig.adapters("load", [LOADED_RANK] * (1 + LOADS))
    found = measure_loads(rig.settings(preset=PRESET, host_memory_bytes=12 * GIB), refs)
    least_s = rig.adapter_bytes([LOADED_RANK]) / link
    beside = f"{median(found.beside_s) / median(found.others_s):.3f}"
    rows = [[*_beside(f"rank {LOADED_RANK}", least_s, found.loads_s), beside]]
    headings = ["a load", "ms", "by the link, ms", "of the link", "steps beside one / others"]
    print_table(f"Loads, one a second, beside {LOAD_DECODES} decodes", headings, rows)


def cold(rig: Rig) -> None:
    """Print TTFT by preset. The adapter is on the host; with ``cached`` it is on the device."""
    times = 1 + COLD_REPEATS
    ranks = [rank for rank, _ in product(COLD_RANKS, range(len(COLD_TOKENS) * times))]
    refs = rig.adapters("cold", ranks, ("q", "k", "v"))
    found = {preset: _cold_times(rig, preset, refs, times) for preset in COLD_PRESETS}
    table = [
        [name, *(f"{1e3 * found[preset][name]:.1f}" for preset in COLD_PRESETS)] for name in found[COLD_PRESETS[0]]
    ]
    print_table("TTFT, ms", ["rank, prompt tokens", *COLD_PRESETS], table)


def _cold_times(rig: Rig, preset: str, refs: Sequence[AdapterRef], times: int) -> dict[str, float]:
    """Return the median TTFT. Each request has another adapter, and the first request of each kind is a warm-up."""
    found = {}
    waiting = iter(refs)
    with rig.replica(preset=preset, host_memory_bytes=12 * GIB) as built:
        fill_host(built.engine, tuple(refs))
        settle(built.engine)
        for rank, tokens in product(COLD_RANKS, COLD_TOKENS):
            seconds = []
            for repeat in range(times):
                (request,) = make_requests(f"{rank}-{tokens}-{repeat}", 1, tokens, 1, [next(waiting)], seed=repeat)
                began_s = time.perf_counter()
                run_all(built, [request])
                seconds.append(time.perf_counter() - began_s)
            found[f"{rank}, {tokens}"] = median(seconds[1:])
    return found


# --- without a GPU: a device that computes nothing ---------------------------------------------------


class TimedEvent:
    """Marks a point in a stream that is reached at a time of the monotonic clock."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s

    def wait(self) -> None:
        """Sleep until the event's time."""
        time.sleep(max(0.0, self.due_s - time.monotonic()))


class TimedStream:
    """Simulates work that takes time, one piece after the other; implements ``device.Stream``.

    Attributes:
        work: begin and end of each piece of work.
    """

    def __init__(self, link_bytes_per_s: float) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._free_s = 0.0
        self.work: list[tuple[float, float]] = []

    def take(self, seconds: float) -> None:
        """Queue work that takes the given time."""
        begins_s = max(self._free_s, time.monotonic())
        self._free_s = begins_s + seconds
        self.work.append((begins_s, self._free_s))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy immediately, because inputs and tokens are small."""
        target.copy_(source)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Copy nothing, but index each block as torch does."""
        for taken, put in zip(copy.source_blocks, copy.target_blocks, strict=True):
            assert copy.source[taken].shape == copy.target[put].shape
        self.take(copy.size_bytes / self._link_bytes_per_s)

    def wait_event(self, event: StreamEvent) -> None:
        """Start further work after the event."""
        assert isinstance(event, TimedEvent)
        self._free_s = max(self._free_s, event.due_s)

    def record_event(self) -> StreamEvent:
        """Return an event at the time when all work so far is done."""
        return TimedEvent(max(self._free_s, time.monotonic()))


class TimedGraph:
    """A captured step."""

    def __init__(self, stream: TimedStream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds

    def replay(self) -> None:
        """Queue a step."""
        self._stream.take(self._seconds)


class TimedDevice:
    """Simulates a device whose work only takes time; implements ``DeviceBackend``, the model's decoder and its kernels.

    Args:
        decode_s: seconds of a captured step.
        called_s: seconds of any other step.
        link_bytes_per_s: bandwidth of copies.
    """

    copies_ahead = Cuda.copies_ahead
    has_graphs = fits_graphs = True
    name = "timed"
    threads = 1

    def __init__(self, decode_s: float, called_s: float, link_bytes_per_s: float) -> None:
        self._decode_s = decode_s
        self._called_s = called_s
        self.link_bytes_per_s = link_bytes_per_s
        self.steps = TimedStream(link_bytes_per_s)
        self._logits = torch.zeros(0)

    def stream(self) -> TimedStream:
        """Return a new stream."""
        return TimedStream(self.link_bytes_per_s)

    def capture(self, work: Callable[[], None]) -> TimedGraph:
        """Return a graph of a step, without running the work."""
        return TimedGraph(self.steps, self._decode_s)

    def register(self, memory: Tensor) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None

    def signals(self) -> None:
        """Return None: there are no host workers."""

    def view_kv(self, arena: Tensor, block_size: int) -> Tensor:
        """Return a view whose shape gives a block's number of tokens, the only property that is read."""
        return arena[:1, :block_size].view(1, 1, 1, block_size)

    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """Queue an eager step."""
        self.steps.take(self._called_s)
        return torch.zeros(len(batch.sample_rows), 1)

    def head(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Return zeros as logits."""
        return self._logits.expand(len(hidden), -1)

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Wait for the step, as reading its tokens would, and return token 0 for each row."""
        self.steps.record_event().wait()
        return torch.zeros(len(logits), dtype=torch.int64)

    def pin_threads(self, cores: object) -> AbstractContextManager[None]:
        """Do nothing, because the device has no threads."""
        return nullcontext()

    def model(self, settings: Settings, folder: Path, *_: object) -> RankModel:
        """Replace ``rank_setup.load_rank``."""
        config = read_model_config(folder)
        self._logits = torch.zeros(1, config.vocab_size)
        it: Any = self
        return RankModel(config, it, it, torch.bfloat16, torch.device("cpu"), config.geometry(2))


@contextmanager
def timed_rig(device: TimedDevice, memory_bytes: int = 8 * GIB, host_bytes: int = 2 * GIB, **rig: Any) -> Iterator[Rig]:
    """Run engines that are built within the context on the device. The device's memory is never written."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-gpu-host-") as folder,
        mock.patch("lorikeet.worker.transfer.transfers.device_at", return_value=device),
        mock.patch("lorikeet.worker.torch_executor.load_rank", device.model),
    ):
        yield Rig(Path(folder), device="cpu", memory_bytes=memory_bytes, host_memory_bytes=host_bytes, **rig)


def host(device: TimedDevice, requests: int = 150, count: int = LOADS) -> None:
    """Print the time of a load beside the link's, and the device's idle time between steps."""
    with timed_rig(device) as rig:
        load_s, least_s = host_load(rig, device, count, LOADED_RANK)
        idle, gap_s = host_idle(rig, device, requests)
    rows = [
        [f"a load of rank {LOADED_RANK}", f"{load_s * 1e3:.2f} ms"],
        ["the link alone", f"{least_s * 1e3:.2f} ms"],
        ["idle device, 32 of many requests", f"{idle:.1%}"],
        ["a gap in its work", f"{gap_s * 1e3:.2f} ms"],
    ]
    print_table("What the host adds, on a device that computes nothing", ["what", "median"], rows)


def host_load(rig: Rig, device: TimedDevice, count: int, rank: int) -> tuple[float, float]:
    """Return the median seconds of a load, and the seconds that the link alone would take."""
    found = measure_loads(rig.settings(preset=PRESET), rig.adapters("load", [rank] * (1 + count)))
    return median(found.loads_s), rig.adapter_bytes([rank]) / device.link_bytes_per_s


def host_idle(rig: Rig, device: TimedDevice, requests: int) -> tuple[float, float]:
    """Return the device's idle share between its first and its last work, and the median gap in seconds."""
    refs = rig.adapters("idle", [8] * 8)
    with rig.replica(preset=PRESET, max_num_seqs=32) as built:
        fill_host(built.engine, tuple(refs))
        run_all(built, make_requests("warm", len(refs), 64, 16, refs))
        device.steps.work.clear()
        several: list[Request] = []
        for i in range(requests):
            tokens = random.Random(i).randint(16, 160)
            several += make_requests(f"idle-{i}", 1, 64, tokens, [refs[i % len(refs)]], seed=i)
        run_all(built, several)
    work = device.steps.work
    gaps = [begins_s - ended_s for (_, ended_s), (begins_s, _) in pairwise(work)]
    return sum(gaps) / (work[-1][1] - work[0][0]), median([gap for gap in gaps if gap > 0] or [0.0])


PARTS: dict[str, Callable[[Rig], None]] = {
    "limits": limits,
    "steps": steps,
    "adapters": adapters,
    "loads": loads,
    "cold": cold,
    "host": lambda rig: None,
}


if __name__ == "__main__":
    main()
