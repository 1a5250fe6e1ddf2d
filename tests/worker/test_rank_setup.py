"""What a rank takes from the machine at its start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lorikeet.config import EngineSettings
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.worker.rank_setup import allocate_arena

BLOCKS, BLOCK_BYTES = 256, 2**18


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
