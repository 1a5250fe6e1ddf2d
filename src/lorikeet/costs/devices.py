"""Lists the devices and models of composed profiles, from data sheets and model cards.

Rates are dense bf16 on the tensor cores. PCI Express and NVLink rates count one direction. PCI Express 4.0 and 5.0
transfer 16 and 32 GT/s per lane, with a payload of 128 in 130 bits. Copies reach a measured share of that rate.
"""

from dataclasses import dataclass

from lorikeet.core.geometry import ModelGeometry, ModuleShape
from lorikeet.costs.profile import Constant

_GIB = 2**30
_PCIE_4_LANE, _PCIE_5_LANE = (transfers * 128 / 130 / 8 for transfers in (16e9, 32e9))

DEVICE_MEMORY_SHARE = 0.9
"""Share of device memory that an engine may use (vLLM's default); the rest is workspace."""

COPY_S = Constant(6e-6, "s", error=1e-6, source="5 to 7 µs a cudaMemcpyAsync (DualPath, Wu et al., 2026, section 5.2)")
"""Fixed part of a copy between host and device."""
_PCIE_4_SHARE = Constant(
    24.8e9 / (16 * _PCIE_4_LANE),
    "share of the data sheet",
    source="24.8 GB/s, pinned memory to an A100 SXM 80 GB, nvbandwidth 0.8 (NVIDIA's developer forum, thread 352186)",
)
_PCIE_5_SHARE = Constant(
    55.6e9 / (16 * _PCIE_5_LANE),
    "share of the data sheet",
    source="55.6 GB/s, pinned memory to H100, nvbandwidth's README",
)
DRIVE_SHARE = Constant(
    6.8e9 / (4 * _PCIE_4_LANE), "share of the data sheet", source="6.8 GB/s sequential reads, Micron 7450 product brief"
)
DRIVE_S = Constant(80e-6, "s", source="typical latency of a read, Micron 7450 product brief")
"""Fixed part of a read from a drive."""


@dataclass(frozen=True)
class Device:
    """Describes an accelerator.

    Attributes:
        name: name of the device or model in the names of profiles.
        full_name: name that commands print.
        memory_bytes: memory of one device.
        bandwidth_bytes_per_s: bandwidth of its memory.
        flops: dense bf16 operations per second.
        host_bytes_per_s: rate of its PCI Express link, by data sheet.
        host_share: share of ``host_bytes_per_s`` that copies from pinned memory reach.
        drive_bytes_per_s: rate of an NVMe drive's link, four lanes of the same generation, by data sheet.
        peer_bytes_per_s: rate of the links to other devices.
        measured: name of the device whose measured tables are used; the device's own name if it has tables.
        degrees: degrees of tensor parallelism with composed profiles.
        prefill_attention: share of ``flops`` that attention over a long prompt reaches.
    """

    name: str
    full_name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops: float
    host_bytes_per_s: float
    host_share: Constant
    drive_bytes_per_s: float
    peer_bytes_per_s: float
    measured: str
    degrees: tuple[int, ...]
    prefill_attention: Constant


@dataclass(frozen=True)
class Model:
    """Describes a base model in bf16.

    Attributes:
        name: name of the device or model in the names of profiles.
        full_name: name that commands print.
        geometry: geometry of the whole model.
        vocabulary: number of token ids.
        max_model_len: longest sequence.
        measured: name of the model whose measured tables are used; the model's own name if it has tables.
    """

    name: str
    full_name: str
    geometry: ModelGeometry
    vocabulary: int
    max_model_len: int
    measured: str

    @property
    def hidden(self) -> int:
        """Number of features of the residual stream."""
        return self.geometry.modules["q"].in_features

    @property
    def query_features(self) -> int:
        """Number of elements of all query heads."""
        return self.geometry.modules["q"].out_features

    @property
    def weight_bytes(self) -> int:
        """Bytes of all linear weights, the embedding and the output layer; norms are too small to count."""
        shapes = self.geometry.modules.values()
        layer = sum(shape.in_features * shape.out_features for shape in shapes)
        return (self.geometry.layers * layer + 2 * self.vocabulary * self.hidden) * self.geometry.dtype_bytes


def _llama(
    name: str,
    full_name: str,
    layers: int,
    hidden: int,
    kv_heads: int,
    feed_forward: int,
    vocabulary: int = 32000,
    max_model_len: int = 4096,
    measured: str = "",
) -> Model:
    kv = kv_heads * 128
    into = ModuleShape(hidden, feed_forward)
    back = ModuleShape(feed_forward, hidden)
    square = ModuleShape(hidden, hidden)
    narrow = ModuleShape(hidden, kv)
    modules = {"q": square, "k": narrow, "v": narrow, "o": square, "gate": into, "up": into, "down": back}
    geometry = ModelGeometry(layers=layers, kv_heads=kv_heads, head_dim=128, modules=modules, dtype_bytes=2)
    return Model(name, full_name, geometry, vocabulary, max_model_len, measured or name)


MODELS = {
    model.name: model
    for model in (
        _llama("llama-2-7b", "Llama-2-7B", layers=32, hidden=4096, kv_heads=32, feed_forward=11008),
        _llama("llama-2-70b", "Llama-2-70B", layers=80, hidden=8192, kv_heads=8, feed_forward=28672),
        _llama(
            "llama-3-8b",
            "Llama-3-8B",
            layers=32,
            hidden=4096,
            kv_heads=8,
            feed_forward=14336,
            vocabulary=128256,
            max_model_len=8192,
            measured="llama-2-7b",
        ),
        _llama("llama-2-13b", "Llama-2-13B", 40, 5120, 40, 13824, measured="llama-2-7b"),
        _llama("llama-30b", "LLaMA-30B", 60, 6656, 52, 17920, max_model_len=2048, measured="llama-2-7b"),
        # The model is not published under this name, but Code Llama 34B has this shape.
        _llama(
            "llama-2-34b",
            "Llama-2-34B",
            layers=48,
            hidden=8192,
            kv_heads=8,
            feed_forward=22016,
            measured="llama-2-70b",
        ),
    )
}

_AMPERE_ATTENTION = Constant(
    0.615,
    "share of peak",
    error=0.115,
    source="FlashAttention-2 (Dao, 2023): 50 to 73 % of the peak on A100, the middle taken",
)
_HOPPER_ATTENTION = Constant(
    0.35, "share of peak", source="FlashAttention-3 (Shah et al., 2024): FlashAttention-2 reaches 35 % on H100"
)


def _ampere(
    name: str,
    full_name: str,
    *,
    gib: int,
    bandwidth: float,
    flops: float,
    measured: str,
    peer: float = 16 * _PCIE_4_LANE,
    degrees: tuple[int, ...] = (1, 2, 4, 8),
) -> Device:
    return Device(
        name,
        full_name,
        memory_bytes=gib * _GIB,
        bandwidth_bytes_per_s=bandwidth,
        flops=flops,
        host_bytes_per_s=16 * _PCIE_4_LANE,
        host_share=_PCIE_4_SHARE,
        drive_bytes_per_s=4 * _PCIE_4_LANE,
        peer_bytes_per_s=peer,
        measured=measured,
        degrees=degrees,
        prefill_attention=_AMPERE_ATTENTION,
    )


def _hopper(name: str, full_name: str, *, peer: float) -> Device:
    return Device(
        name,
        full_name,
        memory_bytes=80 * _GIB,
        bandwidth_bytes_per_s=3.35e12,
        flops=989e12,
        host_bytes_per_s=16 * _PCIE_5_LANE,
        host_share=_PCIE_5_SHARE,
        drive_bytes_per_s=4 * _PCIE_5_LANE,
        peer_bytes_per_s=peer,
        measured="h100",
        degrees=(1, 2, 4, 8),
        prefill_attention=_HOPPER_ATTENTION,
    )


_DEVICES = (
    _ampere("a40", "A40 48 GB", gib=48, bandwidth=696e9, flops=149.7e12, measured="a40"),
    _ampere("a100-80", "A100 SXM 80 GB", gib=80, bandwidth=2039e9, flops=312e12, measured="a100-80", peer=300e9),
    _hopper("h100", "H100 SXM 80 GB", peer=450e9),
    _ampere("a10", "A10 24 GB", gib=24, bandwidth=600e9, flops=125e12, measured="a40", degrees=(1,)),
    _ampere("a100-40", "A100 SXM 40 GB", gib=40, bandwidth=1555e9, flops=312e12, measured="a100-80", peer=300e9),
    _hopper("h800", "H800 SXM 80 GB", peer=200e9),
)
DEVICES = {device.name: device for device in _DEVICES}
"""Devices by name, with numbers from NVIDIA's data sheets."""
