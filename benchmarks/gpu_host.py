"""What the host adds to the time of a GPU, measured without one: the real engine on a device that only takes time.

    python -m benchmarks.gpu_host

prints JSON. A copy is over when a link of the given speed would be done with it, a graph or a step that is called when
its time is over; nothing is computed, and all tokens are 0. What a run takes beyond is the host's: planning, launching,
telling, and threads that wait for the interpreter. The model has the shape of Llama-2-7B.

- load: an adapter of rank 64 a second on q, k, v, o beside eight decodes, from the plan that asks for it to its report.
- idle: the device's share of time without work, while 32 of many requests run that begin and end all the time.

A kernel that is called costs its host some microseconds on a GPU, and nothing here: prefills are cheaper than there.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.accept.gpu_rig import GpuRig
from benchmarks.accept.inprocess import make_requests, run_all
from benchmarks.accept.memory_8 import RANK, measure_loads
from lorikeet.bench.ceilings import model_cost
from lorikeet.bench.memory_bench import fill_host
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.config import Settings
from lorikeet.core.request import Request
from lorikeet.engine.device import BlockCopy, Mark
from lorikeet.engine.devices import Cuda
from lorikeet.engine.rank_setup import RankModel
from lorikeet.kernels.base import Batch
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.models.config import read_model_config

_ROW = "lorikeet:plain-no-reuse"
_HOST_BYTES, _DEVICE_BYTES = 2 * 2**30, 8 * 2**30
"""Nothing is written to the device's."""
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, (16, 160)
_SMALL_RANK = 8


class TimedMark:
    """A place in a stream that is reached at a time of the monotonic clock."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s

    def wait(self) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, self.due_s - time.monotonic()))


class TimedStream:
    """See ``engine.device.Stream``.

    Attributes:
        work: when each piece of work begins and ends.
    """

    def __init__(self, link_bytes_per_s: float) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._free_s = 0.0
        self.work: list[tuple[float, float]] = []

    def take(self, seconds: float) -> None:
        """Be busy, behind what there is."""
        begins_s = max(self._free_s, time.monotonic())
        self._free_s = begins_s + seconds
        self.work.append((begins_s, self._free_s))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy at once: inputs and tokens are small."""
        target.copy_(source)

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        """Copy nothing, but look at each block as torch does."""
        for taken, put in zip(copy.source_blocks, copy.target_blocks, strict=True):
            assert copy.source[taken].shape == copy.target[put].shape
        self.take(copy.size_bytes / self._link_bytes_per_s)

    def follow(self, mark: Mark) -> None:
        """Begin no sooner."""
        assert isinstance(mark, TimedMark)
        self._free_s = max(self._free_s, mark.due_s)

    def mark(self) -> Mark:
        """Return the time when all is done."""
        return TimedMark(max(self._free_s, time.monotonic()))


class TimedGraph:
    """A step that is one call."""

    def __init__(self, steps: TimedStream, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds

    def replay(self) -> None:
        """Take a step's time."""
        self._steps.take(self._seconds)


class TimedDevice:
    """See ``engine.device.Device``; and it is the model's decoder and its kernels, as far as steps ask for them.

    Args:
        decode_s: of a graph.
        called_s: of any other step.
        link_bytes_per_s: of copies.
    """

    copies_ahead = Cuda.copies_ahead
    has_graphs = fits_graphs = True
    name, threads = "timed", 1

    def __init__(self, decode_s: float, called_s: float, link_bytes_per_s: float) -> None:
        self._decode_s, self._called_s, self._link_bytes_per_s = decode_s, called_s, link_bytes_per_s
        self.steps = TimedStream(link_bytes_per_s)
        self._logits = torch.zeros(0)

    def stream(self) -> TimedStream:
        """Return a new one."""
        return TimedStream(self._link_bytes_per_s)

    def capture(self, work: Callable[[], None]) -> TimedGraph:
        """Return a step."""
        return TimedGraph(self.steps, self._decode_s)

    def register(self, memory: Tensor) -> Callable[[], None]:
        """All memory will do."""
        return lambda: None

    def exchange(self) -> None:
        """There are no host workers."""

    def forward(self, batch: Batch, kv: Tensor, *, logits: bool = True) -> Tensor:
        """Take a step's time."""
        self.steps.take(self._called_s)
        return self._logits.expand(len(batch.sample_rows) if logits else 0, -1)

    def choose(self, logits: Tensor, parameters: ChoiceParameters) -> Tensor:
        """Wait for the step, as whoever reads its tokens does."""
        self.steps.mark().wait()
        return torch.zeros(len(logits), dtype=torch.int64)

    def apart(self, cores: object) -> AbstractContextManager[None]:
        """The one thread runs where it likes."""
        return nullcontext()

    def model(self, settings: Settings, folder: Path, *_: object) -> RankModel:
        """Stand in for ``rank_setup.load_rank``."""
        config = read_model_config(folder)
        self._logits = torch.zeros(1, config.vocab_size)
        it: Any = self
        return RankModel(config, it, it, torch.bfloat16, torch.device("cpu"), config.geometry(2))


@contextmanager
def timed_rig(device: TimedDevice, **rig: Any) -> Iterator[GpuRig]:
    """Let engines that are built meanwhile compute on the device."""
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-gpu-host-") as folder,
        mock.patch("lorikeet.engine.transfers.device_at", return_value=device),
        mock.patch("lorikeet.engine.torch_executor.load_rank", device.model),
    ):
        yield GpuRig(Path(folder), device="cpu", memory_bytes=_DEVICE_BYTES, host_memory_bytes=_HOST_BYTES, **rig)


def measure_load(rig: GpuRig, link_bytes_per_s: float, loads: int) -> dict[str, float]:
    """Return what a load takes, and what the link alone would; the first adapter warms up."""
    refs = rig.references(rig.folders("load", [RANK] * (1 + loads), ATTENTION))
    found = measure_loads(rig.settings(row=_ROW), [refs[:1], refs[1:]])
    (parameters,) = model_cost(rig.config, 2, [RANK], ATTENTION).adapter_parameters
    link_s = 2 * parameters / link_bytes_per_s
    load_s = median(found["loads_s"][1:])
    return {"load_ms": load_s * 1e3, "link_ms": link_s * 1e3, "share_of_link": link_s / load_s}


def measure_idle(rig: GpuRig, device: TimedDevice, requests: int) -> dict[str, float]:
    """Return the device's idle share between its first and its last work, and what it waits at a time."""
    refs = rig.references(rig.folders("idle", [_SMALL_RANK] * 8, ATTENTION))
    with rig.replica(row=_ROW, max_running=32) as built:
        fill_host(built.engine, tuple(refs))
        run_all(built, make_requests("warm", len(refs), _PROMPT_TOKENS, _ANSWER_TOKENS[0], refs))
        device.steps.work.clear()
        several: list[Request] = []
        for i in range(requests):
            tokens = random.Random(i).randint(*_ANSWER_TOKENS)
            several += make_requests(f"idle-{i}", 1, _PROMPT_TOKENS, tokens, [refs[i % len(refs)]], seed=i)
        run_all(built, several)
    work = device.steps.work
    gaps = [begins_s - ended_s for (_, ended_s), (begins_s, _) in pairwise(work)]
    return {
        "idle_share": sum(gaps) / (work[-1][1] - work[0][0]),
        "gaps": sum(gap > 0 for gap in gaps),
        "gap_ms": median([gap for gap in gaps if gap > 0]) * 1e3,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decode-ms", type=float, default=6.5, help="of a step in which all decode")
    parser.add_argument("--called-ms", type=float, default=10.0, help="of any other step")
    parser.add_argument("--link-gb-s", type=float, default=55.0, help="of copies from the host")
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--requests", type=int, default=150)
    args = parser.parse_args()
    device = TimedDevice(args.decode_ms / 1e3, args.called_ms / 1e3, args.link_gb_s * 1e9)
    with timed_rig(device) as rig:
        figures = {
            "load": measure_load(rig, args.link_gb_s * 1e9, args.loads),
            "idle": measure_idle(rig, device, args.requests),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
