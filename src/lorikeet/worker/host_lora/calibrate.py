"""Measures the costs of assisted prefills on this machine when the engine starts, in a fraction of a second."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import inf
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from lorikeet.config import ConfigError
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.plan import SequenceStart
from lorikeet.core.request import SamplingParams
from lorikeet.costs.assist_costs import UNIT_MODULES, AssistCosts, qkv_share, row_bytes, tokens_within_budget
from lorikeet.memory.packing import pack
from lorikeet.models.decoder import Decoder
from lorikeet.presets import HostLayers, LayerGroups, Preset
from lorikeet.worker.batch import BatchRow, RankSequence, build_batch
from lorikeet.worker.host_lora.pool import HostPool, HostRows
from lorikeet.worker.host_lora.worker import HostAdapter, ProductWidths
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.transfer.device import Stream

_HOST_TOKENS = (1, 16, 64)
_HOST_RANKS = (8, 64)
DEVICE_TOKENS = (16, 64, 256)
"""Lengths of prefills that are measured on the device. The shortest is the time that hides the workers."""
_SLICE_TOKENS = tuple(1 << exponent for exponent in range(9))
_REPEATS = 5
_DEVICE_LAYERS = 3
_DEVICE_REPEATS = 2
"""The first one may compile kernels."""
_MAX_DEVICE_S = 0.1
"""Total time of measured layers after which no longer prefill is measured."""

_COPY_BLOCKS = 16
_GROUP_S = 50e-6
"""Overhead of the copy thread per group of blocks."""

_MIN_TOKEN_RANK_S = 1e-12
"""Lower bound of the time per token and rank, so that a fit of noise is not negative."""


class HostTimes(NamedTuple):
    """One worker's time for a layer: ``fixed_s + token_s * tokens + token_rank_s * tokens * rank``.

    Attributes:
        fixed_s: constant part.
        token_s: time to hand over a token's row.
        token_rank_s: compute time per token and rank.
        rank: the largest rank that was measured.
    """

    fixed_s: float
    token_s: float
    token_rank_s: float
    rank: int

    def seconds(self, tokens: int) -> float:
        """Return the time of ``tokens`` tokens with an adapter of the largest measured rank."""
        return self.fixed_s + (self.token_s + self.token_rank_s * self.rank) * tokens


def measure(
    pool: HostPool,
    model: RankModel,
    arena: Tensor,
    host: Tensor,
    steps: Stream,
    block_size: int,
    most_tokens: int,
    preset: Preset,
    link_bytes_per_s: float,
    *,
    cores_shared: bool,
) -> AssistCosts:
    """Measure the costs of assisted prefills.

    Both arenas must be empty; their content is undefined afterwards.

    Args:
        pool: workers that are ready.
        model: runs prefills on the device.
        arena, host: the arenas of the device and the host, ``[blocks, elements]``.
        steps: the stream in which the device computes steps.
        block_size: tokens of KV in a block.
        most_tokens: length in tokens of the longest prefill to measure.
        preset: the preset, which has the options of assisted prefills.
        link_bytes_per_s: bandwidth of the declared link, 0 to measure it.
        cores_shared: whether workers share the cores that compute the base model, so that their time adds to the
            step's.

    Raises:
        ConfigError: the host tier is too small for one layer of an adapter.
        ExecutorError: a worker was lost.
    """
    geometry = model.geometry
    host_times = measure_host(pool, geometry, host, arena.device)
    layer_times = measure_device(model, arena, steps, block_size, most_tokens)
    bandwidth = link_bytes_per_s or _measure_copy(arena, host)
    share = qkv_share(geometry)
    costs = AssistCosts(
        layers=geometry.layers,
        row_bytes=row_bytes(geometry, pool.ring.shape.ranks),
        device_layer=layer_times,
        qkv_share=0.0 if cores_shared else share,
        host_fixed_s=host_times.fixed_s,
        host_token_s=host_times.token_s,
        host_token_rank_s=host_times.token_rank_s,
        load_fixed_s=_GROUP_S,
        load_bandwidth=bandwidth,
        workers=pool.workers,
        worker_tokens=1,
        one_group=preset.layer_groups is LayerGroups.ONE,
        is_static=preset.host_layers is HostLayers.STATIC,
        waits=preset.host_layers is HostLayers.PATIENT,
    )
    tokens = tokens_per_worker(host_times, geometry, costs.device_layer_s(DEVICE_TOKENS[0]), bandwidth)
    pool.worker_tokens = tokens * preset.host_chunk
    return msgspec.structs.replace(costs, worker_tokens=pool.worker_tokens)


def tokens_per_worker(times: HostTimes, geometry: ModelGeometry, layer_s: float, bandwidth: float) -> int:
    """Return the number of tokens that a worker computes while a layer is loaded (TOPPINGS, section 4.2).

    Args:
        times: measured times of a worker.
        geometry: sizes of the model.
        layer_s: time of a layer in a short prefill on the device.
        bandwidth: bytes per second over the link.
    """
    unit_bytes = row_bytes(geometry)
    load_s = times.rank * sum(unit_bytes[module] for module in UNIT_MODULES) / bandwidth
    budget_s = qkv_share(geometry) * layer_s + load_s
    return tokens_within_budget(budget_s, [(tokens, times.seconds(tokens)) for tokens in _SLICE_TOKENS])


def measure_host(pool: HostPool, geometry: ModelGeometry, host: Tensor, place: torch.device) -> HostTimes:
    """Measure the times of one worker.

    Args:
        pool: the workers, the first of which is measured.
        geometry: sizes of the rank's share of the model.
        host: the host arena, ``[blocks, elements]``, which gets test adapters.
        place: the model's device.

    Raises:
        ConfigError: the host tier is too small for one layer of an adapter.
        ExecutorError: a worker was lost.
    """
    elements = host.shape[1]
    adapters: dict[int, HostAdapter] = {}
    for rank in _HOST_RANKS:
        by_layer = (rank, *[0] * (geometry.layers - 1))
        ranks = dict.fromkeys(UNIT_MODULES, by_layer)
        blocks = pack(ranks, geometry, elements).blocks
        if blocks <= len(host):
            adapters[rank] = HostAdapter(ranks, tuple(BlockId(block) for block in range(blocks)))
    if not adapters:
        raise ConfigError(f"host_memory_bytes: {len(host)} blocks cannot hold a layer of an adapter; raise it")
    pool.worker_tokens = pool.ring.shape.rows  # This way one worker gets all rows.
    rescued = pool.rescued_slices
    pool.begin(list(adapters.values()))
    computed = []
    handed_over = []
    counts = [tokens for tokens in _HOST_TOKENS if tokens <= pool.ring.shape.rows]
    for (number, rank), tokens in product(enumerate(adapters), counts):
        widths = ProductWidths(geometry)
        x = torch.zeros(tokens, widths.inputs["qkv"], dtype=host.dtype, device=place)
        qkv = torch.zeros(tokens, widths.outputs["qkv"], dtype=host.dtype, device=place)
        assignment = pool.assign([HostRows(number, 0, tokens)])
        seconds = []
        for _ in range(_REPEATS):
            pool.submit("qkv", 0, x, assignment)
            pool.add_to(qkv)
            pool.settle()
            seconds.append(pool.computed_s)
        if pool.rescued_slices > rescued:  # The rank has computed a part itself, which was not timed.
            raise ExecutorError("a host worker was lost during its measurement")
        computed.append((tokens * rank, min(seconds)))
        handed_over.append((tokens, median(list(pool.handovers_s)[-_REPEATS:])))
    pool.end()
    pool.handovers_s.clear()
    token_rank_s, computing_s = _fit_line(computed)
    token_s, handover_s = _fit_line(handed_over)
    return HostTimes(handover_s + computing_s, token_s, max(_MIN_TOKEN_RANK_S, token_rank_s), max(adapters))


@torch.inference_mode()
def measure_device(
    model: RankModel, arena: Tensor, steps: Stream, block_size: int, most_tokens: int
) -> tuple[tuple[int, float], ...]:
    """Return (tokens, seconds of a layer) for prefills of several lengths.

    The time of a layer is the difference between a step with several layers and a step with one layer. A step also has
    an embedding, a last norm and a wait, which on a GPU take as long as a layer with few tokens.
    """
    geometry = model.geometry
    most_layers = min(_DEVICE_LAYERS, geometry.layers)
    assert isinstance(model.decoder, Decoder), "only the own decoder has layers that can be timed"
    decoders = {layers: model.decoder.cut(layers) for layers in (1, most_layers)}
    kv = model.decoder.view_kv(arena, block_size)
    times: list[tuple[int, float]] = []
    for tokens in [count for count in DEVICE_TOKENS if count <= most_tokens] or [most_tokens]:
        blocks = -(-tokens // block_size)
        if times and (sum(seconds for _, seconds in times) > _MAX_DEVICE_S or blocks > len(arena)):
            break
        sequence = RankSequence(SequenceStart(RequestId(""), [0] * tokens, tokens, SamplingParams(max_tokens=1), None))
        sequence.add_blocks(BlockId(block) for block in range(blocks))
        batch = build_batch([BatchRow(sequence, 0, tokens, True)], {}, block_size, arena.device)
        batch = replace(batch, sample_rows=torch.arange(tokens, device=arena.device))
        best_s = dict.fromkeys(decoders, inf)
        for layers in list(decoders) * _DEVICE_REPEATS:
            start_s = time.monotonic()
            decoders[layers].hidden(batch, kv[:layers])
            steps.record_event().wait()
            best_s[layers] = min(best_s[layers], time.monotonic() - start_s)
        layer_s = best_s[1]
        if most_layers > 1:
            more_s = (best_s[most_layers] - layer_s) / (most_layers - 1)
            # The measurement is noisy, so a layer counts as at least a third of its step.
            layer_s = min(layer_s, max(more_s, layer_s / 3))
        times.append((tokens, layer_s))
    return tuple(times)


def _fit_line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Return slope and intercept of a least-squares line through points. Both are at least 0."""
    at, seconds = np.array(list(points)).T
    slope, start = np.polyfit(at, seconds, 1)
    return max(0.0, float(slope)), max(0.0, float(start))


def _measure_copy(arena: Tensor, host: Tensor) -> float:
    """Measure the bandwidth of copies from host to device, in bytes per second."""
    blocks = min(_COPY_BLOCKS, len(arena), len(host))
    arena[:blocks].copy_(host[:blocks])
    start_s = time.monotonic()
    arena[:blocks].copy_(host[:blocks])
    return arena[:blocks].nbytes / (time.monotonic() - start_s)
