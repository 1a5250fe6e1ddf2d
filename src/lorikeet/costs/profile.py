"""The profile of one (device, model, parallelism): every constant that a decision or a simulation may ask for.

A profile is a TOML file that people can read. It is measured by ``lorikeet profile``, or composed from published
timings and data sheets. What nobody has measured stays empty, and whoever needs it fails with the field's name:
there are no defaults to be wrong by.
"""

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from math import inf, isnan
from pathlib import Path
from typing import TypeVar

import msgspec
import tomli_w

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo

FORMAT = 1
"""Version of the file format; others are refused."""

T = TypeVar("T")


class ProfileError(ValueError):
    """A profile cannot be read, or lacks a constant that is needed; the message names profile and field."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One constant.

    Attributes:
        value: in ``unit``.
        unit: such as ``s``, ``s/token`` or ``bytes/s``.
        error: half the width of the 95 % interval of ``value``, in ``unit``; None where it was not measured.
        source: where a value that was not measured here comes from.
    """

    value: float
    unit: str
    error: float | None = None
    source: str = ""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds as a function of a count, as ``core.interpolation`` reads points.

    Attributes:
        unit: what is counted, such as ``tokens``.
        points: (count, seconds), ascending, at least one.
        error: the largest relative error of a point left out and interpolated from its neighbours.
        source: where points that were not measured here come from.
        errors: half the width of the 95 % interval of each point's seconds; empty where they were not measured.
    """

    unit: str
    points: tuple[tuple[int, float], ...]
    error: float | None = None
    source: str = ""
    errors: tuple[float, ...] = ()


class FitQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well a model meets the measurements it was made from.

    Attributes:
        r2: coefficient of determination.
        worst: largest relative error of a single measurement.
        points: how many measurements.
    """

    r2: float
    worst: float
    points: int


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one step of the base model: the sum of all parts, times ``average``.

    Attributes:
        tokens: operators that work on each token alone (projections, norms, all-reduce), over the tokens of the step.
        sampled_rows: the head and the choice of tokens, over the rows that sample.
        decode_attention: per token of context that a decoding sequence reads.
        decode_sequence: per decoding sequence.
        prefill_attention: per pair of query and key of a prefill chunk.
        prefill_sequence: per prefill chunk.
        loop: time of the engine's loop between two steps.
        loop_sequence: the same, per sequence of the step.
        average: how long steps take on average, as a share of the sum of the parts, which were fitted to medians:
            others on the machine make some steps longer and none shorter. None, if composed, counts as 1.
        fit: of whole steps, None if composed.
    """

    tokens: Curve
    sampled_rows: Curve
    decode_attention: Constant
    decode_sequence: Constant
    prefill_attention: Constant
    prefill_sequence: Constant
    loop: Constant
    loop_sequence: Constant
    average: Constant | None = None
    fit: FitQuality | None = None


class LoraCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What adapters add to a step under one kernel form, in a step that has any.

    The form decides what is counted (:class:`lorikeet.costs.model.LoraWork`): ``unpadded`` each row with its own rank,
    ``padded`` each row with the largest rank of the step, ``einsum`` each row with the largest rank of every adapter.
    A rank counts as one over all of the profile's ``lora_modules``; adapters of other modules count by their size.

    Attributes:
        fixed: once per step.
        decode_row_rank: per rank of a decoding row.
        prefill_token_rank: per rank of a prefilled token.
        adapter_rank: per rank of a distinct adapter that a row decodes under; of einsums, of every distinct adapter.
        row: per token that has an adapter, whatever its rank; None adds nothing.
        adapter: per distinct adapter, whatever its rank; None adds nothing.
        prefill: once per step that prefills a token under an adapter; None adds nothing.
        decode_fit, prefill_fit: of what adapters add, the largest error relative to the whole step; None if published.
    """

    fixed: Constant
    decode_row_rank: Constant
    prefill_token_rank: Constant
    adapter_rank: Constant
    row: Constant | None = None
    adapter: Constant | None = None
    prefill: Constant | None = None
    decode_fit: FitQuality | None = None
    prefill_fit: FitQuality | None = None


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A way for weights or KV: a transfer of b bytes takes ``fixed + b / bandwidth``.

    Attributes:
        fixed: seconds.
        bandwidth: bytes per second.
        fit: None if from a data sheet.
    """

    fixed: Constant
    bandwidth: Constant
    fit: FitQuality | None = None

    def seconds(self, moved_bytes: float) -> float:
        """Return the time of a transfer of so many bytes."""
        return self.fixed.value + moved_bytes / self.bandwidth.value


class Transfers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Links between the tiers of memory.

    Attributes:
        source_to_device, source_to_host: an adapter from its files into blocks of either tier.
        host_to_device, device_to_host: blocks between the tiers, of adapters and KV alike; all ranks at once.
    """

    source_to_device: Link | None = None
    source_to_host: Link | None = None
    host_to_device: Link | None = None
    device_to_host: Link | None = None


class Switching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Changing the adapter that is merged into the base weights.

    A merge writes every weight that the new adapter touches anew, from its pristine copy and the product of A and B;
    what only the old one touched is restored from its pristine copy, in the same pass. Both are in proportion to the
    weights that are touched; the times here are for all of the profile's ``lora_modules`` on every layer.

    Attributes:
        merge: of an adapter of those modules, whatever its rank.
        merge_rank: the same, per rank in the profile's unit.
        restore: of those modules' pristine weights.
        merge_fit: of merges over ranks; None if composed.
    """

    merge: Constant
    merge_rank: Constant
    restore: Constant
    merge_fit: FitQuality | None = None


class HostLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What host cores add to a layer of a prefill on which they compute x·A·B for q, k and v instead of the device.

    The rows of a layer are cut into slices, one for each core, and the layer goes on when the last one has ended.

    Attributes:
        fixed: handing over to the host and back, per layer.
        token: the same, per row handed over.
        token_rank: of the longest slice, per rank (over q, k and v) of a row.
        cores: that take slices.
        core_tokens: rows that suit one core; a longer prompt than all cores so take is cut evenly.
    """

    fixed: Constant
    token: Constant
    token_rank: Constant
    cores: int
    core_tokens: int


class OperatingLoads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The highest loads of one replica under an SLO, by the rank of its adapters; found by simulation.

    Attributes:
        kernel_form: of the adapters.
        slo: that enough of the requests met.
        prompt_tokens, output_tokens: of every request.
        max_num_seqs, max_num_batched_tokens: of the engine.
        tokens_per_s: by rank; prompts and answers.
        source: how they were found, in words.
    """

    kernel_form: KernelForm
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tokens_per_s: dict[int, float]
    source: str = ""


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """See the module.

    Attributes:
        name: such as ``a40-llama-2-7b``.
        device: in words.
        model: its name.
        tensor_parallel: ranks.
        origin: ``measured``, or what it was composed from, in words.
        made: date, and for measured ones revision and machine.
        geometry: sizes of the whole model.
        vocabulary: number of token ids.
        max_model_len: longest sequence.
        pool_bytes: device memory for adapters and KV over all ranks, weights and workspace excluded.
        lora_modules: modules over which a rank counts as one.
        step: the base model's steps.
        lora: by kernel form.
        transfers: links between tiers.
        switching, host_lora: of mechanisms that not every profile knows.
        weight_bytes: of the base model over all ranks; None where nobody needs it.
        overlapped: whether the device runs the next decode step while the host is at the last one's tokens.
        kernel_efficiency: share of the machine's limit that a part of the step reaches, by part.
        operating_points: what placements of a cluster go by, for each setting that was asked for.
        format: of the file.
    """

    name: str
    device: str
    model: str
    tensor_parallel: int
    origin: str
    made: str
    geometry: ModelGeometry
    vocabulary: int
    max_model_len: int
    pool_bytes: int
    lora_modules: tuple[str, ...]
    step: StepCosts
    lora: dict[KernelForm, LoraCosts] = {}
    transfers: Transfers = Transfers()
    switching: Switching | None = None
    host_lora: HostLora | None = None
    weight_bytes: int | None = None
    overlapped: bool = False
    kernel_efficiency: dict[str, Constant] = {}
    operating_points: tuple[OperatingLoads, ...] = ()
    format: int = FORMAT

    def need(self, value: T | None, field: str) -> T:
        """Return ``value``, a field of this profile called ``field``.

        Raises:
            ProfileError: it is empty.
        """
        if value is None:
            raise ProfileError(f"profile {self.name} knows no {field}")
        return value

    def lora_costs(self, form: KernelForm) -> LoraCosts:
        """Return the costs of a kernel form.

        Raises:
            ProfileError: there are none.
        """
        return self.need(self.lora.get(form), f"lora.{form}")


def read_profile(path: Path) -> CostProfile:
    """Read a profile.

    Raises:
        ProfileError: it cannot be read, or is of another format.
    """
    try:
        return decode_profile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error


def decode_profile(text: str, where: str) -> CostProfile:
    """Read a profile from TOML; ``where`` names it in errors.

    Raises:
        ProfileError: it is not one, of another format, or says what cannot be.
    """
    try:
        tables = tomllib.loads(text)
        if tables.get("format") != FORMAT:
            raise ProfileError(f"{where}: format {tables.get('format')!r}, this version reads {FORMAT}")
        profile = msgspec.convert(tables, CostProfile, str_keys=True)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ProfileError(f"{where}: {error}") from error
    for problem in _problems(profile, ""):
        raise ProfileError(f"{where}: {problem}")
    return profile


def _problems(value: object, field: str) -> Iterator[str]:
    """Yield what no profile can say, as somebody may write it by hand."""
    match value:
        case Constant(value=number) if isnan(number):
            yield f"{field}: {number} is no figure"
        case Curve(points=points):
            counts = [count for count, _ in points]
            if not counts or any(later <= earlier for earlier, later in pairwise(counts)):
                yield f"{field}: points have ascending counts, at least one, not {counts}"
            if any(not 0 <= seconds < inf for _, seconds in points):
                yield f"{field}: a point takes some time from 0 on"
        case Link(bandwidth=bandwidth) if not bandwidth.value > 0:
            yield f"{field}.bandwidth: {bandwidth.value} bytes/s move nothing"
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from _problems(getattr(value, name), f"{field}.{name}" if field else name)
        case dict():
            for name, each in value.items():
                yield from _problems(each, f"{field}.{name}")


def encode_profile(profile: CostProfile) -> str:
    """Return a profile as TOML."""
    return tomli_w.dumps(msgspec.to_builtins(profile, str_keys=True) | {"format": FORMAT})


def write_profile(profile: CostProfile, path: Path) -> None:
    """Write a profile to ``path``."""
    path.write_text(encode_profile(profile), encoding="utf-8")
