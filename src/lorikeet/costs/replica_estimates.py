"""Estimates a replica's costs, memory and throughput from its device, model or profile.

An estimate need only have the right order of magnitude, because replicas replace it by measurements within their first
seconds of work (``cluster.controller.learned_costs``). Ratios matter more than absolute values, because policies
compare replicas.
"""

from collections.abc import Sequence

import msgspec

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.devices import DEVICE_MEMORY_SHARE, DEVICES, Device
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile, ProfileError
from lorikeet.costs.transfer_model import LinkDirection, TransferModel

CORE_FLOPS = 100e9
"""Operations per second that one core reaches in products."""
MEMORY_BYTES_PER_S = 12e9
"""Least number of bytes per second that all cores together read from memory."""
CPU_LINK_BYTES_PER_S = 4e9
"""Bytes per second at which a replica on a CPU copies an adapter into its blocks."""
CPU_MEMORY_BYTES = 4 * 2**30
"""Largest memory of an engine for adapters and KV on a CPU (``engine.memory_bytes``)."""
_CPU_STEP_S = 2e-3
_GPU_STEP_S = 4e-3
"""Seconds for scheduling, sampling and launching of a step."""
_SHARE = 0.5
"""Share of a device's nominal rates that steps reach."""
_LORA_TIMES = 4.0
"""Factor by which LoRA's thin products in a prefill take longer than their operations at these rates."""

_CONTEXT = 576
_PROMPT = 512
_BATCH = 16
_LOW = 8
_HIGH = 64
"""Tokens, sequences and ranks of the steps from whose times the costs of a profile are computed."""

ANSWER_SHARE = 1 / 16
"""Weight of a delayed running answer, relative to a delayed request that waits for its first token.

It was chosen on the odd scenarios of benchmarks/auto and the 40 workloads of tests/simulator/test_host_tier.
"""

UNLOADED_TIMES = 5.0
"""Largest multiple of an unloaded replica's latency that counts as met if there is no target."""

BUSY_SHARE = 0.8
"""Share of its throughput at which a replica still answers within ``UNLOADED_TIMES`` times its unloaded TTFT.

In a queue with exponential gaps and service times, a request takes 1 / (1 - share) service times on average.
"""


def estimate_costs(
    geometry: ModelGeometry, vocabulary: int, device: str, cores: int, gpus: Sequence[str] = (), ranks: int = 1
) -> ReplicaCosts:
    """Estimate the costs of one replica from its device and the sizes of its model.

    Args:
        geometry: geometry of the whole model.
        vocabulary: number of token ids.
        device: ``cpu`` or ``cuda``.
        cores: number of cores of a replica that runs on a CPU.
        gpus: names of this machine's GPUs. An unknown GPU counts as an A100.
        ranks: tensor-parallel ranks.
    """
    weights = _weights(geometry, vocabulary)
    rank_elements = geometry.layers * sum(shape.in_features + shape.out_features for shape in geometry.modules.values())
    if device == "cpu":
        step_s = _CPU_STEP_S
        flops = ranks * (cores * CORE_FLOPS)
        bytes_per_s = ranks * MEMORY_BYTES_PER_S
        link_bytes_per_s = ranks * CPU_LINK_BYTES_PER_S
    else:
        known = _device_of(gpus)
        step_s = _GPU_STEP_S
        flops = ranks * (_SHARE * known.flops)
        bytes_per_s = ranks * (_SHARE * known.bandwidth_bytes_per_s)
        link_bytes_per_s = ranks * (known.host_bytes_per_s * known.host_share.value)
    return ReplicaCosts(
        step_s=step_s + weights * geometry.dtype_bytes / bytes_per_s,
        prefill_token_s=2 * weights / flops,
        decode_s=2 * weights / flops,
        lora_s=step_s / 4,
        lora_prefill_s=_LORA_TIMES * 2 * rank_elements / flops,
        lora_decode_s=max(_LORA_TIMES * 2 * rank_elements / flops, rank_elements * geometry.dtype_bytes / bytes_per_s),
        load_s=1e-4,
        load_bytes_per_s=link_bytes_per_s,
    )


def estimate_memory_bytes(
    geometry: ModelGeometry, vocabulary: int, device: str, gpus: Sequence[str] = (), ranks: int = 1
) -> int:
    """Estimate the bytes of memory of a rank for adapters and KV. See :func:`estimate_costs` for the arguments."""
    if device == "cpu":
        return CPU_MEMORY_BYTES
    weights = _weights(geometry, vocabulary) * geometry.dtype_bytes // ranks
    memory = _device_of(gpus).memory_bytes
    return max(int(DEVICE_MEMORY_SHARE * memory) - weights, memory // 10)


def profile_costs(profile: CostProfile, form: KernelForm, link_bytes_per_s: float = 0.0) -> ReplicaCosts:
    """Compute the costs of a replica from the differences between a few steps of its profile.

    Args:
        profile: profile of the replica. Costs that the profile lacks keep the defaults of ``ReplicaCosts``.
        form: kernel form.
        link_bytes_per_s: bytes per second of a declared link; 0 for the link of the profile.
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


def estimated_load(
    costs: ReplicaCosts,
    rank: int,
    prompt_tokens: int,
    output_tokens: int,
    max_batch: int,
    tpot_s: float = 0.0,
) -> float:
    """Return the tokens per second that a replica serves within its targets if all adapters have this rank.

    The replica is assumed to decode in the largest batch whose step stays within the TPOT target, and to prefill beside
    the decodes.

    Args:
        costs: costs of the replica.
        rank: rank of every adapter.
        prompt_tokens, output_tokens: lengths of every request.
        max_batch: most sequences in a step.
        tpot_s: TPOT target in seconds; 0 for ``UNLOADED_TIMES`` times the TPOT of one sequence alone.
    """
    limit_s = tpot_s or UNLOADED_TIMES * costs.decode_step_s(1, rank)
    fixed_s = costs.decode_step_s(0, rank)
    sequence_s = costs.decode_step_s(1, rank) - fixed_s
    batch = max_batch if sequence_s <= 0 else (limit_s - fixed_s) / sequence_s
    batch = min(max(batch, 1.0), float(max_batch))
    request_s = costs.prefill_s(prompt_tokens, rank) + output_tokens * costs.decode_step_s(batch, rank) / batch
    return BUSY_SHARE * (prompt_tokens + output_tokens) / max(request_s, 1e-9)


def _weights(geometry: ModelGeometry, vocabulary: int) -> int:
    """Return the number of elements of all linear weights and the output layer."""
    linear = sum(shape.in_features * shape.out_features for shape in geometry.modules.values())
    return geometry.layers * linear + vocabulary * geometry.modules["q"].in_features


def _device_of(gpus: Sequence[str]) -> Device:
    """Return the known device of the first recognized GPU; an A100 if none is recognized."""
    for gpu in gpus:
        name = gpu.upper().replace(" ", "-")
        for device in DEVICES.values():
            if device.name.split("-")[0].upper() in name:
                return device
    return DEVICES["a100-80"]
