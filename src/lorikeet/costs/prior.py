"""A first guess of what steps and loads cost, from the device and the sizes of the model.

It only has to be of the right order: replicas replace it within their first seconds of work by what they measure
(``cluster.controller.learned_costs``). Ratios matter more than sizes, since policies compare replicas.
"""

from collections.abc import Sequence

import msgspec

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.devices import DEVICE_MEMORY_SHARE, DEVICES, Device
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile, ProfileError
from lorikeet.costs.transfers import LinkDirection, TransferModel

CORE_FLOPS, MEMORY_BYTES_PER_S = 100e9, 12e9
"""What one core reaches in products, and what all of them together read from memory at least."""
CPU_LINK_BYTES_PER_S = 4e9
"""How fast a CPU's replica copies an adapter into its blocks."""
CPU_MEMORY_BYTES = 4 * 2**30
"""What an engine takes at most for adapters and KV on a CPU (``engine.memory_bytes``)."""
_CPU_STEP_S, _GPU_STEP_S = 2e-3, 4e-3
"""Scheduling, sampling and launching of a step."""
_SHARE = 0.5
"""Share of a device's rates that steps reach."""
_LORA_TIMES = 4.0
"""How much longer LoRA's thin products take in a prefill than their operations would at those rates."""
_CONTEXT, _PROMPT, _BATCH, _LOW, _HIGH = 576, 512, 16, 8, 64
"""Tokens, sequences and ranks of the steps whose times give the costs of a profile."""


def prior_costs(
    geometry: ModelGeometry, vocabulary: int, device: str, cores: int, gpus: Sequence[str] = (), ranks: int = 1
) -> ReplicaCosts:
    """Return the guess for one replica.

    Args:
        geometry: of the whole model.
        vocabulary: number of token ids.
        device: ``cpu`` or ``cuda``.
        cores: that a replica computes on, if it runs on a CPU.
        gpus: names of this machine's GPUs; an unknown one counts as an A100.
        ranks: tensor-parallel ranks.
    """
    shapes, weights = geometry.modules.values(), _weights(geometry, vocabulary)
    rank_elements = geometry.layers * sum(shape.in_features + shape.out_features for shape in shapes)
    if device == "cpu":
        flops, bytes_per_s, step_s, link = cores * CORE_FLOPS, MEMORY_BYTES_PER_S, _CPU_STEP_S, CPU_LINK_BYTES_PER_S
    else:
        known = _device_of(gpus)
        flops, bytes_per_s = _SHARE * known.flops, _SHARE * known.bandwidth_bytes_per_s
        step_s, link = _GPU_STEP_S, known.host_bytes_per_s * known.host_share.value
    flops, bytes_per_s, link = ranks * flops, ranks * bytes_per_s, ranks * link
    return ReplicaCosts(
        step_s=step_s + weights * geometry.dtype_bytes / bytes_per_s,
        prefill_token_s=2 * weights / flops,
        decode_s=2 * weights / flops,
        lora_s=step_s / 4,
        lora_prefill_s=_LORA_TIMES * 2 * rank_elements / flops,
        lora_decode_s=max(_LORA_TIMES * 2 * rank_elements / flops, rank_elements * geometry.dtype_bytes / bytes_per_s),
        load_s=1e-4,
        load_bytes_per_s=link,
    )


def prior_memory_bytes(
    geometry: ModelGeometry, vocabulary: int, device: str, gpus: Sequence[str] = (), ranks: int = 1
) -> int:
    """Return how much memory a rank probably has for adapters and KV; arguments as of :func:`prior_costs`."""
    if device == "cpu":
        return CPU_MEMORY_BYTES
    weights = _weights(geometry, vocabulary) * geometry.dtype_bytes // ranks
    memory = _device_of(gpus).memory_bytes
    return max(int(DEVICE_MEMORY_SHARE * memory) - weights, memory // 10)


def profile_costs(profile: CostProfile, form: KernelForm, link_bytes_per_s: float = 0.0) -> ReplicaCosts:
    """Return the costs of a profile's replica: differences between a few of its steps.

    Args:
        profile: of the replica. What it does not know about adapters or the link stays as in ``ReplicaCosts``.
        form: kernel form.
        link_bytes_per_s: of a declared link; 0 for the profile's.
    """
    model = CostModel(profile, form)

    def decode_s(sequences: int, rank: int = 0) -> float:
        adapters = (number if rank else None for number in range(sequences))
        return model.step_s(step_work((SequenceWork(_CONTEXT, 1, True, each, rank) for each in adapters), form))

    def prefill_s(tokens: int, rank: int = 0) -> float:
        return model.step_s(step_work([SequenceWork(0, tokens, True, 0 if rank else None, rank)], form))

    sequence_s = (decode_s(_BATCH) - decode_s(1)) / (_BATCH - 1)
    step_s = max(0.0, decode_s(1) - sequence_s)
    costs = ReplicaCosts(step_s, max(0.0, prefill_s(_PROMPT) - step_s) / _PROMPT, sequence_s)
    if form in profile.lora:
        counted = _BATCH if form is not KernelForm.EINSUM else _BATCH**2
        decode_rank_s = (decode_s(_BATCH, _HIGH) - decode_s(_BATCH, _LOW)) / counted / (_HIGH - _LOW)
        added_s = decode_s(_BATCH, _LOW) - decode_s(_BATCH) - decode_rank_s * counted * _LOW
        prefill_rank_s = (prefill_s(_PROMPT, _HIGH) - prefill_s(_PROMPT, _LOW)) / _PROMPT / (_HIGH - _LOW)
        costs = msgspec.structs.replace(
            costs, lora_s=max(0.0, added_s), lora_prefill_s=prefill_rank_s, lora_decode_s=decode_rank_s
        )
    try:
        link = TransferModel(profile, 1, link_bytes_per_s).link(LinkDirection.IN)
    except ProfileError:
        return costs
    return msgspec.structs.replace(costs, load_s=link.fixed.value, load_bytes_per_s=link.bandwidth.value)


def _weights(geometry: ModelGeometry, vocabulary: int) -> int:
    """Return the number of elements of all linear weights and the output layer."""
    shapes, hidden = geometry.modules.values(), geometry.modules["q"].in_features
    return geometry.layers * sum(shape.in_features * shape.out_features for shape in shapes) + vocabulary * hidden


def _device_of(gpus: Sequence[str]) -> Device:
    for gpu in gpus:
        name = gpu.upper().replace(" ", "-")
        for device in DEVICES.values():
            if device.name.split("-")[0].upper() in name:
                return device
    return DEVICES["a100-80"]
