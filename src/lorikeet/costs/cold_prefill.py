"""Computes the time of a prefill whose adapters are still being loaded by layers (TOPPINGS, sections 4.1 and 4.2).

The device computes LoRA on layers whose adapter weights have arrived. On other layers host cores compute LoRA, and the
layer waits for them. TOPPINGS hides a part of that wait behind the product of q, k and v. A profile's ``host_lora``
counts the remaining part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.plan import Groups
from lorikeet.costs.assist_costs import UNIT_MODULES, AssistCosts, row_bytes, slice_rows
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.transfer_model import LinkDirection, TransferModel
from lorikeet.memory.packing import pack, runs_needed
from lorikeet.presets import HostLayers, LayerGroups, Preset

_SOON_S = 1e-9
"""Seconds within which an arriving layer counts as present, because floating-point sums depend on their order."""

_PREFILLS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Token counts of the prefills with known times."""

_RANK = 64
"""Rank of the measured adapter. The planner scales its time on the device to the ranks of other adapters."""


class ColdAdapter(NamedTuple):
    """Describes an adapter of an assisted prefill.

    Attributes:
        layers_s: arrival time of each layer, in seconds from the start of the prefill.
        rows: number of tokens of each of the adapter's sequences.
        rank: rank of the adapter, as ``AssistCosts`` counts ranks.
        left_to_host: layers that a static plan computes on the host, even if they have arrived.
        handovers: number of products per layer that the adapter changes.
    """

    layers_s: tuple[float, ...]
    rows: tuple[int, ...]
    rank: float
    left_to_host: range = range(0)
    handovers: int = 1


def assist_costs(transfers: TransferModel, preset: Preset) -> AssistCosts | None:
    """Return the assist costs of a modelled replica; None without host cores.

    The time of an adapter on the device comes from a step with only this adapter.

    Raises:
        ProfileError: the profile has ``host_lora``, but no link from the host.
    """
    profile = transfers.profile
    host = profile.host_lora
    if host is None:
        return None
    model = CostModel(profile, preset.kernel_form)
    link = transfers.link(LinkDirection.IN)
    return AssistCosts(
        layers=profile.geometry.layers,
        row_bytes=row_bytes(profile.geometry, profile.tensor_parallel),
        device_layer=tuple((tokens, _prefill_s(model, tokens) / profile.geometry.layers) for tokens in _PREFILLS),
        qkv_share=0.0,  # ``host_lora`` counts only time that is not hidden
        host_fixed_s=host.fixed.value,
        host_token_s=host.token.value,
        host_token_rank_s=host.token_rank.value,
        load_fixed_s=link.fixed.value,
        load_bandwidth=link.bandwidth.value,
        workers=host.cores,
        worker_tokens=host.core_tokens * preset.host_chunk,
        one_group=preset.layer_groups is LayerGroups.ONE,
        is_static=preset.host_layers is HostLayers.STATIC,
        waits=preset.host_layers is HostLayers.PATIENT,
        device_token_rank_s=_lora_s(model) / profile.geometry.layers,
    )


def _prefill_s(model: CostModel, tokens: int, rank: float = 0.0) -> float:
    return model.step_s(step_work([SequenceWork(0, tokens, True, "adapter" if rank else None, rank)], model.form))


def _lora_s(model: CostModel) -> float:
    """Return the seconds of an adapter in a prefill, per token and rank over ``UNIT_MODULES``; 0 if unknown."""
    profile = model.profile
    tokens = _PREFILLS[-1]
    if model.form not in profile.lora:
        return 0.0
    one = AdapterRef(
        AdapterName(""), AdapterDigest(""), "", dict.fromkeys(UNIT_MODULES, (1,) * profile.geometry.layers), 0
    )
    longer_s = _prefill_s(model, tokens, _RANK * model.adapter_rank(one)) - _prefill_s(model, tokens)
    return longer_s / (tokens * _RANK)


def host_layer_s(adapters: Sequence[ColdAdapter], costs: AssistCosts) -> float:
    """Return the seconds that the host adds to a layer that it computes for these adapters."""
    if not adapters:
        return 0.0
    rows = [count for each in adapters for count in each.rows]
    ranks = [each.rank for each in adapters for _ in each.rows]
    slices = slice_rows(rows, costs.worker_tokens, costs.workers)
    slowest = max(sum(part.rows * ranks[part.request] for part in worker) for worker in slices)
    handovers = max(each.handovers for each in adapters)
    return handovers * (costs.host_fixed_s + costs.host_token_s * sum(rows)) + costs.host_token_rank_s * slowest


def prefill_s(
    step_s: Callable[[frozenset[AdapterDigest]], float],
    cold: Mapping[AdapterDigest, ColdAdapter],
    costs: AssistCosts,
) -> float:
    """Return the time of a step with cold adapters. Each layer takes an equal share of the step.

    Args:
        step_s: returns the time of the whole step if the device computes LoRA for the given cold adapters.
        cold: the adapters that are being loaded.
        costs: costs of the host. With ``is_static``, the host computes the layers that are planned to arrive last, and
            the step waits for the others. With ``waits``, the step waits for layers that arrive before the host would
            finish.
    """
    now = 0.0
    known_s: dict[frozenset[AdapterDigest], float] = {}
    for layer in range(costs.layers):
        if costs.is_static:
            there = frozenset(name for name, each in cold.items() if layer not in each.left_to_host)
            now = max([now, *(cold[name].layers_s[layer] for name in there)])
        else:
            if costs.waits:
                coming = {each.layers_s[layer]: host_layer_s([each], costs) for each in cold.values()}
                now = max([now, *(due_s for due_s, host_s in coming.items() if due_s - now < host_s)])
            there = frozenset(name for name, each in cold.items() if each.layers_s[layer] <= now + _SOON_S)
        if there not in known_s:
            away = [each for name, each in cold.items() if name not in there]
            known_s[there] = step_s(there) / costs.layers + host_layer_s(away, costs)
        now += known_s[there]
    return now


def layer_arrivals_s(
    ref: AdapterRef, groups: Groups, ends_s: Sequence[float], transfers: TransferModel
) -> tuple[float, ...]:
    """Return the arrival time of each layer of an adapter, from ``groups`` of blocks that end at ``ends_s``.

    A layer that the adapter does not target counts as present from the start.
    """
    geometry = transfers.profile.geometry
    packing = pack(ref.ranks, geometry, transfers.block_bytes // geometry.dtype_bytes, ref.extras)
    needed = runs_needed(packing, geometry.layers, groups)
    return tuple(ends_s[runs - 1] if runs else float("-inf") for runs in needed)
