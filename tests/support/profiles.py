"""A small profile with round numbers."""

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.costs.profile import Constant, CostProfile, Curve, Link, LoraCosts, StepCosts, Transfers

GEOMETRY = ModelGeometry(
    layers=2, kv_heads=1, head_dim=4, modules=dict.fromkeys(LORA_MODULES, ModuleShape(8, 8)), dtype_bytes=2
)
"""A token of KV takes 32 bytes, a rank of an adapter of q alone 64."""


def seconds(value: float) -> Constant:
    """A constant in seconds."""
    return Constant(value, "s")


def _bandwidth(bytes_per_s: float) -> Constant:
    return Constant(bytes_per_s, "bytes/s")


def round_profile(**changes: object) -> CostProfile:
    """Return a profile in which all is easy to add up.

    A step takes 10 ms, 1 ms for each token after the first, 0.1 ms per token of context that a decode reads, and 1 ms
    per rank of a row. Reading an adapter takes 50 ms into device blocks and 40 ms into host blocks; a block of 16
    tokens takes 1 ms to the device and 2 ms to the host.
    """
    lora = LoraCosts(
        fixed=seconds(0.0), decode_row_rank=seconds(0.001), prefill_token_rank=seconds(0.001), adapter_rank=seconds(0.0)
    )
    fields = {
        "name": "round",
        "device": "none",
        "model": "tiny",
        "tensor_parallel": 1,
        "origin": "made up",
        "made": "2026-11-20",
        "geometry": GEOMETRY,
        "vocabulary": 1000,
        "max_model_len": 1000,
        "pool_bytes": 32 * 16 * 400,
        "lora_modules": ("q",),
        "step": StepCosts(
            tokens=Curve("tokens", ((1, 0.010), (2, 0.011))),
            sampled_rows=Curve("rows", ((1, 0.0),)),
            decode_attention=seconds(0.0001),
            decode_sequence=seconds(0.0),
            prefill_attention=seconds(0.0),
            prefill_sequence=seconds(0.0),
            loop=seconds(0.0),
            loop_sequence=seconds(0.0),
        ),
        "lora": {KernelForm.UNPADDED: lora},
        "transfers": Transfers(
            source_to_device=Link(seconds(0.050), _bandwidth(1e12)),
            source_to_host=Link(seconds(0.040), _bandwidth(1e12)),
            host_to_device=Link(seconds(0.0), _bandwidth(512e3)),
            device_to_host=Link(seconds(0.0), _bandwidth(256e3)),
        ),
        **changes,
    }
    return CostProfile(**fields)  # type: ignore[arg-type]
