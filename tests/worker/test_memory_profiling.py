"""The size of a rank's arena, and the step that is measured for it."""

from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lorikeet.config import AdapterSettings, ConfigError, EngineSettings, Settings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.interface import Batch
from lorikeet.kernels.triton import attention_launch
from lorikeet.models.decoder import Decoder
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.worker import decode_graphs, memory_profiling
from lorikeet.worker.memory_profiling import (
    arena_blocks,
    largest_step,
    measure_step_bytes,
    measured_step_bytes,
    run_decodes,
    run_step,
    share_left_bytes,
)
from lorikeet.worker.rank_setup import RankModel, allocate_arena, load_rank, rank_device
from tests.models.checkpoints import make_checkpoint
from tests.support.driver import fp32_settings

GIB = 2**30


@pytest.mark.parametrize(
    ("share", "total", "free", "step", "left"),
    [
        (0.9, 80, 64, 2, 52),
        (1.0, 80, 64, 0, 64),
        (0.5, 80, 64, 2, 20),
        (0.2, 80, 64, 2, 0),
    ],
)
def test_the_share_is_of_the_whole_device_and_others_count(
    share: float, total: int, free: int, step: int, left: int
) -> None:
    assert share_left_bytes(share, total * GIB, free * GIB, step * GIB) == left * GIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RankModel:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", num_hidden_layers=2)
    return load_rank(fp32_settings(kernels="reference"), folder, SingleRankGroup())


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Those that decoders compute."""
    seen: list[Batch] = []
    hidden = Decoder.hidden

    def noted(self: Decoder, batch: Batch, kv: Tensor) -> Tensor:
        seen.append(batch)
        return hidden(self, batch, kv)

    monkeypatch.setattr(Decoder, "hidden", noted)
    return seen


@pytest.mark.parametrize(
    ("step_tokens", "running", "longest", "lengths"),
    [
        (40, 4, 64, [37, 1, 1, 1]),
        (40, 4, 16, [16, 16, 7, 1]),
        (40, 2, 16, [16, 16]),
        (3, 8, 16, [1, 1, 1]),
    ],
)
def test_the_largest_step_has_all_tokens_and_sequences_and_a_whole_adapter(
    model: RankModel,
    batches: list[Batch],
    step_tokens: int,
    running: int,
    longest: int,
    lengths: list[int],
) -> None:
    engine = EngineSettings(block_size=4, max_num_batched_tokens=step_tokens, max_num_seqs=running)
    assert run_step(model, engine, 24, largest_step(engine, longest))
    (batch,) = batches
    assert batch.row_starts.diff().tolist() == lengths
    assert len(batch.sample_rows) == len(lengths)
    assert batch.lora is not None
    assert (batch.lora.largest_rank, batch.lora.modules) == (24, frozenset(LORA_MODULES))
    run_step(model, engine, 0, largest_step(engine, longest))
    assert batches[-1].lora is None


def test_a_step_of_einsums_has_every_adapter_there_may_be(model: RankModel, batches: list[Batch]) -> None:
    run_step(model, EngineSettings(preset="dlora", block_size=4), 24, [4, 1, 1, 1, 1])
    (lora,) = [batch.lora for batch in batches if batch.lora is not None]
    assert (lora.form, len({segment.weights for segment in lora.segments})) == (KernelForm.EINSUM, 5)


def test_steps_of_all_kinds_are_run_once_the_largest_has_been_measured(
    model: RankModel, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter((100, 7_000_000_000))
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: next(held))
    engine = EngineSettings(block_size=4, max_num_batched_tokens=20, max_num_seqs=3)
    taken_bytes = measure_step_bytes(model, engine, 8, 64)
    first, *others = [tuple(batch.row_starts.diff().tolist()) for batch in batches]
    assert first == (18, 1, 1)
    assert set(others) == {(2,), (4,), (8,), (16,), (20,), (17, 1), (17, 1, 1), (1,), (1, 1), (1, 1, 1)}
    assert {0 if batch.lora is None else batch.lora.largest_rank for batch in batches} == {0, 8}
    assert 0 < 7_000_000_000 - 100 - taken_bytes < 2**20, "the arena of the step does not count"


@pytest.mark.slow
@pytest.mark.parametrize("longest_tokens", [16, 17, 20, 21, 64])
def test_decodes_of_long_contexts_are_run_whatever_the_longest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_tokens: int
) -> None:
    for module in (attention_launch, decode_graphs, memory_profiling):
        monkeypatch.setattr(module, "LONG_TOKENS", 16)
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    model = load_rank(fp32_settings(kernels="triton"), tmp_path, SingleRankGroup())
    run_decodes(model, EngineSettings(block_size=4, max_num_seqs=1), 0, 1, longest_tokens)


def test_a_device_too_small_for_the_largest_step_is_refused_at_the_start(
    model: RankModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object) -> int:
        raise CalledProcessError(1, ["gcc"])

    monkeypatch.setattr(memory_profiling, "measure_step_bytes", measure)
    on_gpu = RankModel(**{**vars(model), "device": type("Gpu", (), {"type": "cuda"})()})
    settings = fp32_settings(max_num_batched_tokens=40, max_num_seqs=4, memory_bytes=2**20)
    with pytest.raises(ExecutorError, match=r"40 tokens in 4 sequences .* 'reference': CalledProcessError: .*gcc"):
        arena_blocks(settings, on_gpu, 64)


def test_only_a_gpu_is_measured(model: RankModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(model: object, engine: object, rank: int, longest_tokens: int) -> int:
        asked.append(rank)
        return 7

    monkeypatch.setattr(memory_profiling, "measure_step_bytes", measure)
    settings = fp32_settings(memory_bytes=0)
    assert measured_step_bytes(settings, model, 64) == 0
    on_gpu = RankModel(**{**vars(model), "device": type("Gpu", (), {"type": "cuda"})()})
    assert measured_step_bytes(settings, on_gpu, 64) == 7
    for adapters, rank in ((AdapterSettings(max_rank=32), 32), (AdapterSettings(enabled=False), 0)):
        assert measured_step_bytes(Settings(settings.model, settings.engine, adapters), on_gpu, 64) == 7
        assert asked[-1] == rank
    assert asked[0] == 128


def test_the_error_distinguishes_torch_without_cuda_from_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fp32_settings(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for version, complaint in ((None, r"torch .* is built without CUDA"), ("13.0", "torch sees 0")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(ConfigError, match=complaint):
            rank_device(settings, 0)


# --- What a rank takes from the machine at its start --------------------------------------------

BLOCKS = 256
BLOCK_BYTES = 2**18


def resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("touched", [False, True])
def test_an_arena_takes_memory_at_once_only_if_it_is_to(*, touched: bool) -> None:
    geometry = ModelGeometry(4, 8, 128, dict.fromkeys(LORA_MODULES, ModuleShape(8, 8)), dtype_bytes=2)
    engine = EngineSettings(touch_memory=touched)
    assert geometry.block_bytes(engine.block_size) == BLOCK_BYTES
    model = cast("Any", SimpleNamespace(geometry=geometry, device=torch.device("cpu"), dtype=torch.bfloat16))
    before = resident_bytes()
    arena = allocate_arena(model, BLOCKS, engine)
    taken = resident_bytes() - before
    assert (taken > BLOCKS * BLOCK_BYTES * 0.9) == touched, taken
    assert not arena.any()
