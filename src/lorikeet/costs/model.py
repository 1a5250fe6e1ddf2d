"""Implements the performance model: the time of a step, as a sum over its work.

Each part of the sum depends on one count. All tokens of a step pass through the products, norms and collectives;
attention depends on the context of each sequence, and LoRA depends on the ranks of the rows. TOPPINGS (section 5) and
dLoRA (section 4) model LoRA by the sum of ranks or by the padded product. This model does the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterExtra, AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.interpolation import interpolate
from lorikeet.core.plan import KernelForm
from lorikeet.costs.profile import CostProfile, Curve, LoraCosts


class SequenceWork(msgspec.Struct, frozen=True, gc=False):
    """Describes the work of one sequence in a step.

    Attributes:
        start: number of tokens with KV before the step.
        tokens: computed in the step.
        samples: whether the sequence yields a token.
        adapter: adapter version of the sequence, as any distinct value; None for the base model.
        rank: rank of the adapter in the profile's unit; 0 for the base model.
    """

    start: int
    tokens: int
    samples: bool
    adapter: object
    rank: float


class LoraWork(NamedTuple):
    """Counts the ranks of a step, as its kernel form counts them.

    Attributes:
        decode_row_ranks: ranks over the decoding rows.
        prefill_token_ranks: ranks over the prefilled tokens.
        adapter_ranks: ranks over the distinct adapters of decoding rows; for einsums, over all distinct adapters.
        rows: number of tokens that have an adapter.
        adapters: number of distinct adapters.
    """

    decode_row_ranks: float
    prefill_token_ranks: float
    adapter_ranks: float
    rows: int = 0
    adapters: int = 0


class StepWork(NamedTuple):
    """Holds the counts that the model uses.

    Attributes:
        tokens: computed in the step.
        sampled_rows: number of sequences that yield a token.
        decodes: number of sequences that compute one token and have earlier tokens.
        decode_context_tokens: number of tokens to which the decodes attend, including their own tokens.
        prefills: number of the other sequences.
        prefill_pairs: number of pairs of query and key in the prefills' attention.
        lora: None without adapters.
    """

    tokens: int
    sampled_rows: int
    decodes: int
    decode_context_tokens: int
    prefills: int
    prefill_pairs: int
    lora: LoraWork | None


def step_work(sequences: Iterable[SequenceWork], form: KernelForm) -> StepWork:
    """Count the work of a step."""
    tokens = sampled = decodes = context = prefills = pairs = 0
    decode_rows = prefill_rows = 0
    decode_ranks = prefill_ranks = 0.0
    ranks: dict[object, float] = {}
    decoding: set[object] = set()
    for sequence in sequences:
        count = sequence.tokens
        tokens += count
        sampled += sequence.samples
        is_decode = count == 1 and sequence.start > 0
        if is_decode:
            decodes += 1
            context += sequence.start + 1
        else:
            prefills += 1
            pairs += count * sequence.start + count * (count + 1) // 2
        if sequence.adapter is not None:
            ranks[sequence.adapter] = sequence.rank
            if is_decode:
                decoding.add(sequence.adapter)
                decode_rows += 1
                decode_ranks += sequence.rank
            else:
                prefill_rows += count
                prefill_ranks += count * sequence.rank
    if not ranks:
        return StepWork(tokens, sampled, decodes, context, prefills, pairs, None)
    # In a prefill, kernels read adapter weights during the computation, so only decodes wait for the weights.
    if form is KernelForm.UNPADDED:
        read = sum(ranks[adapter] for adapter in decoding)
    else:
        largest = max(ranks.values())
        is_einsum = form is KernelForm.EINSUM
        padded = largest * (len(ranks) if is_einsum else 1)
        decode_ranks = padded * decode_rows
        prefill_ranks = padded * prefill_rows
        read = largest * len(ranks if is_einsum else decoding)
    lora = LoraWork(decode_ranks, prefill_ranks, read, decode_rows + prefill_rows, len(ranks))
    return StepWork(tokens, sampled, decodes, context, prefills, pairs, lora)


class CostModel:
    """Predicts the seconds of steps from a profile. The same work always gives the same prediction.

    Args:
        profile: profile with the constants.
        form: kernel form of the adapters.

    Attributes:
        profile, form: see the arguments.
        average: mean time of steps, as a share of the sum of their parts (``StepCosts.average``).
    """

    def __init__(self, profile: CostProfile, form: KernelForm) -> None:
        self.profile = profile
        self.form = form
        self._step = profile.step
        self.average = 1.0 if profile.step.average is None else profile.step.average.value
        self._tokens = _Interpolation(profile.step.tokens)
        self._rows = _Interpolation(profile.step.sampled_rows)
        one_rank = dict.fromkeys(profile.lora_modules, (1,) * profile.geometry.layers)
        self._elements_of_a_rank = adapter_elements(one_rank, profile.geometry)

    def step_s(self, work: StepWork) -> float:
        """Return the mean time of a step in the executor.

        Raises:
            ProfileError: the step has adapters, and the profile does not know the kernel form.
        """
        step = self._step
        seconds = (
            self._tokens.at(work.tokens)
            + self._rows.at(work.sampled_rows)
            + step.decode_sequence.value * work.decodes
            + step.decode_attention.value * work.decode_context_tokens
            + step.prefill_sequence.value * work.prefills
            + step.prefill_attention.value * work.prefill_pairs
        )
        if work.lora is not None:
            seconds += lora_s(self.profile.lora_costs(self.form), work.lora)
        return self.average * seconds

    def growth_s(self, work: StepWork) -> float:
        """Return the seconds by which each repeated step is longer than the one before, because the context grows."""
        return self.average * self._step.decode_attention.value * work.decodes

    def loop_s(self, sequences: int) -> float:
        """Return the time of the engine loop beside a step of this many sequences."""
        return self.average * (self._step.loop.value + self._step.loop_sequence.value * sequences)

    def adapter_rank(self, ref: AdapterRef) -> float:
        """Return an adapter's rank in the profile's unit: its size in ranks over all layers and ``lora_modules``."""
        return adapter_elements(ref.ranks, self.profile.geometry) / self._elements_of_a_rank


def adapter_elements(
    ranks: Mapping[str, tuple[int, ...]], geometry: ModelGeometry, extras: Sequence[AdapterExtra] = ()
) -> int:
    """Return the number of block elements that an adapter takes.

    Args:
        ranks: the rank of each layer by module.
        geometry: sizes of the model.
        extras: weights of the adapter beside A and B.
    """
    low_rank = sum(sum(by_layer) * geometry.row_elements(module) for module, by_layer in ranks.items())
    return low_rank + sum(extra.columns * sum(extra.rows) for extra in extras)


def lora_s(costs: LoraCosts, work: LoraWork) -> float:
    """Return the seconds that adapters add to a step."""
    seconds = (
        costs.fixed.value
        + costs.decode_row_rank.value * work.decode_row_ranks
        + costs.prefill_token_rank.value * work.prefill_token_ranks
        + costs.adapter_rank.value * work.adapter_ranks
    )
    if costs.row is not None:
        seconds += costs.row.value * work.rows
    if costs.adapter is not None:
        seconds += costs.adapter.value * work.adapters
    if costs.prefill is not None and work.prefill_token_ranks:
        seconds += costs.prefill.value
    return seconds


class _Interpolation:
    """Interpolates a curve, with a cache. A count of 0 takes no time."""

    def __init__(self, curve: Curve) -> None:
        self._points = curve.points
        self._known: dict[int, float] = {0: 0.0}

    def at(self, count: int) -> float:
        if count not in self._known:
            self._known[count] = interpolate(self._points, count)
        return self._known[count]
