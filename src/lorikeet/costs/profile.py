"""Defines the cost profile of one (device, model, parallelism), which decisions and simulations use.

A profile is a readable TOML file. It is measured by ``lorikeet profile``, or composed from published timings and data
sheets. A constant that was not measured stays empty, and its use fails with the field's name. Constants have no
defaults, which could be wrong.
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
"""Version of the file format. Files of other versions are rejected."""

T = TypeVar("T")


class ProfileError(ValueError):
    """A profile cannot be read, or lacks a required constant. The message names the profile and the field."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One constant.

    Attributes:
        value: value in ``unit``.
        unit: unit, such as ``s``, ``s/token`` or ``bytes/s``.
        error: half the width of the 95 % interval of ``value``, in ``unit``; None if it was not measured.
        source: source of a value that was not measured here.
    """

    value: float
    unit: str
    error: float | None = None
    source: str = ""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds seconds as a function of a count, interpolated by ``core.interpolation``.

    Attributes:
        unit: counted unit, such as ``tokens``.
        points: at least one (count, seconds), ascending.
        error: largest relative error of a point that is left out and interpolated from its neighbours.
        source: source of points that were not measured here.
        errors: half the width of the 95 % interval of each point's seconds; empty if they were not measured.
    """

    unit: str
    points: tuple[tuple[int, float], ...]
    error: float | None = None
    source: str = ""
    errors: tuple[float, ...] = ()


class FitQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes how well a model matches the measurements to which it was fitted.

    Attributes:
        r2: coefficient of determination.
        worst: largest relative error of a single measurement.
        points: number of measurements.
    """

    r2: float
    worst: float
    points: int


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the parts of the time of a base model's step, which is their sum times ``average``.

    Attributes:
        tokens: time of token-wise operators (projections, norms, all-reduce), by the number of tokens in the step.
        sampled_rows: time of the output layer and sampling, by the number of rows that sample.
        decode_attention: time per token of context that a decoding sequence reads.
        decode_sequence: time per decoding sequence.
        prefill_attention: time per pair of query and key of a prefill chunk.
        prefill_sequence: time per prefill chunk.
        loop: time of the engine's loop between two steps.
        loop_sequence: additional time of the loop per sequence of the step.
        average: mean time of steps, as a share of the sum of the parts. The parts were fitted to medians, and other
            programs on the machine only make steps longer. None in composed profiles, which counts as 1.
        fit: errors of whole steps; None if composed.
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
    """Holds the time that adapters add to a step under one kernel form.

    The form determines the counted ranks (:class:`lorikeet.costs.model.LoraWork`): ``unpadded`` each row with its own
    rank, ``padded`` each row with the largest rank of the step, ``einsum`` each row with the largest rank of every
    adapter. A rank counts as one over all of the profile's ``lora_modules``; adapters on other modules count by their
    size.

    Attributes:
        fixed: time once per step.
        decode_row_rank: time per rank of a decoding row.
        prefill_token_rank: time per rank of a prefilled token.
        adapter_rank: time per rank of a distinct adapter of decoding rows; for einsums, of every distinct adapter.
        row: time per token that has an adapter of any rank; None adds no time.
        adapter: time per distinct adapter of any rank; None adds no time.
        prefill: time once per step that prefills a token with an adapter; None adds no time.
        decode_fit, prefill_fit: errors of the time that adapters add, the largest relative to the whole step; None if
            published.
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
    """Describes a link for weights or KV: a transfer of b bytes takes ``fixed + b / bandwidth``.

    Attributes:
        fixed: seconds.
        bandwidth: bytes per second.
        fit: None if from a data sheet.
    """

    fixed: Constant
    bandwidth: Constant
    fit: FitQuality | None = None

    def seconds(self, moved_bytes: float) -> float:
        """Return the time of a transfer of this many bytes."""
        return self.fixed.value + moved_bytes / self.bandwidth.value


class Transfers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the links between the tiers of memory.

    Attributes:
        source_to_device, source_to_host: links from an adapter's files to the blocks of either tier.
        host_to_device, device_to_host: links for blocks of adapters and KV between the tiers, used by all ranks in
            parallel.
    """

    source_to_device: Link | None = None
    source_to_host: Link | None = None
    host_to_device: Link | None = None
    device_to_host: Link | None = None


class Switching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the costs of changing the adapter that is merged into the base weights.

    A merge rewrites every weight that the new adapter targets, from its original value and the product of A and B. In
    the same pass, weights that only the old adapter targeted are restored from their original values. Both times are
    proportional to the weights that are written. The constants are for all of the profile's ``lora_modules`` on every
    layer.

    Attributes:
        merge: time to merge an adapter of any rank on those modules.
        merge_rank: additional time per rank in the profile's unit.
        restore: time to restore those modules' original weights.
        merge_fit: errors of merges over ranks; None if composed.
    """

    merge: Constant
    merge_rank: Constant
    restore: Constant
    merge_fit: FitQuality | None = None


class HostLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the time that host cores add to a layer of a prefill by computing x·A·B for q, k and v.

    The rows of a layer are cut into slices, one per core, and the layer continues when the last slice is done.

    Attributes:
        fixed: time per layer to send the work to the host and back.
        token: additional time per row to send the work.
        token_rank: time of the longest slice, per rank (over q, k and v) of a row.
        cores: number of cores that compute slices.
        core_tokens: best number of rows per core. A longer prompt is divided evenly among all cores.
    """

    fixed: Constant
    token: Constant
    token_rank: Constant
    cores: int
    core_tokens: int


class OperatingLoads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds the highest loads of a replica under an SLO by the rank of its adapters, found by simulation.

    Attributes:
        kernel_form: kernel form of the adapters.
        slo: targets that enough requests met.
        prompt_tokens, output_tokens: lengths of every request.
        max_num_seqs, max_num_batched_tokens: limits of the engine.
        tokens_per_s: tokens of prompts and answers per second, by rank.
        source: method by which the loads were found, in words.
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
    """Holds the cost profile of one (device, model, parallelism).

    Attributes:
        name: name of the profile, such as ``a40-llama-2-7b``.
        device: description of the device.
        model: name of the model.
        tensor_parallel: number of ranks.
        origin: ``measured``, or the sources in words.
        made: date of the profile, and for measured profiles also revision and machine.
        geometry: geometry of the whole model.
        vocabulary: number of token ids.
        max_model_len: longest sequence.
        pool_bytes: device memory for adapters and KV over all ranks, without weights and workspace.
        lora_modules: modules over which one rank is defined.
        step: costs of the base model's steps.
        lora: costs of adapters by kernel form.
        transfers: links between tiers.
        switching, host_lora: costs of mechanisms that not every profile has.
        weight_bytes: bytes of the base model's weights over all ranks; None if unknown.
        overlapped: whether the device runs the next decode step while the host processes the last step's tokens.
        kernel_efficiency: share of the machine's limit that a part of the step reaches, by part.
        operating_points: highest loads under an SLO, one entry per setting, for the placements of a cluster.
        format: version of the file format.
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
        """Return ``value``, the value of the profile's field called ``field``.

        Raises:
            ProfileError: the field is empty.
        """
        if value is None:
            raise ProfileError(f"profile {self.name} has no {field}")
        return value

    def lora_costs(self, form: KernelForm) -> LoraCosts:
        """Return the costs of a kernel form.

        Raises:
            ProfileError: the profile has no costs of the form.
        """
        return self.need(self.lora.get(form), f"lora.{form}")


def read_profile(path: Path) -> CostProfile:
    """Read a profile.

    Raises:
        ProfileError: the file cannot be read, or has another format.
    """
    try:
        return decode_profile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error


def decode_profile(text: str, where: str) -> CostProfile:
    """Decode a profile from TOML; ``where`` names it in errors.

    Raises:
        ProfileError: the file is not a profile, has another format, or contains impossible values.
    """
    try:
        tables = tomllib.loads(text)
        if tables.get("format") != FORMAT:
            raise ProfileError(f"{where}: format {tables.get('format')!r} is not supported, only {FORMAT}")
        profile = msgspec.convert(tables, CostProfile, str_keys=True)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ProfileError(f"{where}: {error}") from error
    for problem in _problems(profile, ""):
        raise ProfileError(f"{where}: {problem}")
    return profile


def _problems(value: object, field: str) -> Iterator[str]:
    """Yield a description of each impossible value in a profile, which may be written by hand."""
    match value:
        case Constant(value=number) if isnan(number):
            yield f"{field}: {number} is not a number"
        case Curve(points=points):
            counts = [count for count, _ in points]
            if not counts or any(later <= earlier for earlier, later in pairwise(counts)):
                yield f"{field}: points must have ascending counts, at least one, not {counts}"
            if any(not 0 <= seconds < inf for _, seconds in points):
                yield f"{field}: the seconds of a point must be finite and at least 0"
        case Link(bandwidth=bandwidth) if not bandwidth.value > 0:
            yield f"{field}.bandwidth: must be positive, not {bandwidth.value} bytes/s"
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
