"""What the specs work out of published models: bytes of KV and of adapters."""

import pytest

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.costs.devices import MODELS
from lorikeet.memory.packing import pack

MIB = 2**20
ATTENTION = ("q", "k", "v", "o")


def adapter_mib(geometry: ModelGeometry, rank: int, modules: tuple[str, ...]) -> tuple[float, float]:
    """Return the MiB of its weights, and of the blocks of 16 tokens that it is packed into."""
    packing = pack(dict.fromkeys(modules, (rank,) * geometry.layers), geometry, geometry.block_elements(16))
    weights = packing.used_elements * geometry.dtype_bytes
    return weights / MIB, packing.blocks * geometry.block_bytes(16) / MIB


@pytest.mark.parametrize(
    ("model", "kv_kib", "modules", "mib_by_rank"),
    [
        ("llama-2-70b", 320, ATTENTION, {32: 250, 64: 500}),
        ("llama-2-70b", 320, LORA_MODULES, {32: 790, 64: 1580}),
        ("llama-2-7b", 512, ATTENTION, {8: 16, 16: 32, 32: 64, 64: 128, 128: 256}),
    ],
)
def test_kv_and_adapters_take_what_the_specs_work_out(
    model: str, kv_kib: int, modules: tuple[str, ...], mib_by_rank: dict[int, int]
) -> None:
    geometry = MODELS[model].geometry
    assert geometry.block_bytes(1) == kv_kib * 1024
    for rank, expected in mib_by_rank.items():
        weights, packed = adapter_mib(geometry, rank, modules)
        assert weights == pytest.approx(expected, rel=0.001)
        assert weights <= packed < 1.1 * weights
    if model == "llama-2-7b":
        assert 20 * sum(mib_by_rank.values()) / 1024 == pytest.approx(9.7, abs=0.05)
