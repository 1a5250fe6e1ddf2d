"""Costs of assisted prefills for tests."""

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.costs.assist_costs import AssistCosts, qkv_share, row_bytes

_WIDE, _MLP = 4096, 11008

_SHAPES = {
    **dict.fromkeys(("q", "k", "v", "o"), ModuleShape(_WIDE, _WIDE)),
    **dict.fromkeys(("gate", "up"), ModuleShape(_WIDE, _MLP)),
    "down": ModuleShape(_MLP, _WIDE),
}

LLAMA_2_7B = ModelGeometry(32, 32, 128, {module: _SHAPES[module] for module in LORA_MODULES}, 2)

COSTS = AssistCosts(
    layers=32,
    row_bytes=row_bytes(LLAMA_2_7B),
    device_layer=((64, 0.8e-3), (256, 1.4e-3), (1024, 5e-3)),
    qkv_share=qkv_share(LLAMA_2_7B),
    host_fixed_s=0.2e-3,
    host_token_s=1e-6,
    host_token_rank_s=2.4e-6,
    load_fixed_s=10e-6,
    load_bandwidth=10e9,
    workers=16,
    worker_tokens=16,
)


def adapter_of_rank(rank: int, modules: tuple[str, ...] = ("q", "k", "v"), layers: int = 32) -> AdapterRef:
    return AdapterRef(
        name=AdapterName("a"),
        digest=AdapterDigest("d"),
        folder="",
        ranks=dict.fromkeys(modules, (rank,) * layers),
        weight_bytes=0,
    )
