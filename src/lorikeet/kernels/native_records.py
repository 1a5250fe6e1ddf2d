"""The records that the native library reads. ``native/records.h`` has the same fields in the same order."""

import ctypes
from ctypes import c_int64, c_void_p
from enum import IntEnum
from typing import Any

from lorikeet.kernels.activation import Activation


class NativeRecord(ctypes.Structure):
    """A record that the library reads. Addresses are ``c_void_p``, with None for null."""

    native_name = ""
    """Name of the C++ struct."""

    @property
    def address(self) -> int:
        """Address of the record, valid while the record lives."""
        return ctypes.addressof(self)


class NativeActivation(IntEnum):
    """The enum ``Activation`` of ``native/records.h``."""

    SILU = 0
    GELU_TANH = 1

    @classmethod
    def of(cls, activation: Activation) -> "NativeActivation":
        """Return the number of an activation function."""
        return cls[activation.name]


class WeightRecord(NativeRecord):
    """A packed weight. All fields from ``bits`` on are 0 if the weight is not quantised."""

    native_name = "Weight"
    _fields_ = (
        ("packed", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("item_bytes", c_int64),
        ("bits", c_int64),
        ("group", c_int64),
        ("zero", c_int64),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("scale_bytes", c_int64),
    )


class GroupRecord(NativeRecord):
    """Neighbouring rows with a weight of their own. ``native_groups`` writes these records as rows of an array."""

    native_name = "Group"
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("targets", c_void_p),
        ("rows", c_int64),
        ("segments", c_int64),
    )


class AdaptersRecord(NativeRecord):
    """The adapters of a batch."""

    native_name = "Adapters"
    _fields_ = (
        ("segments", c_void_p),
        ("count", c_int64),
        ("padded_rank", c_int64),
        ("bits", c_int64),
    )


class ExtrasRecord(NativeRecord):
    """The segments whose adapters have changes besides LoRA."""

    native_name = "Extras"
    _fields_ = (
        ("segments", c_void_p),
        ("count", c_int64),
    )


class LayerRecord(NativeRecord):
    """A layer. Products are addresses of ``WeightRecord``. A missing tensor is null, and a missing window is 0.

    With a ``conv`` the layer has a recurrence.
    """

    native_name = "Layer"
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", c_void_p),
        ("o_bias", c_void_p),
        ("attention_norm", c_void_p),
        ("post_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("conv", c_void_p),
        ("conv_bias", c_void_p),
        ("rates", c_void_p),
        ("gate_bias", c_void_p),
        ("skip", c_void_p),
        ("gated_norm", c_void_p),
        ("window", c_int64),
        ("rotation", c_int64),
        ("place", c_int64),
    )


class RecurrencesRecord(NativeRecord):
    """Layers with a recurrence."""

    native_name = "Recurrences"
    _fields_ = (
        ("is_delta", c_int64),
        ("key_heads", c_int64),
        ("heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("taps", c_int64),
        ("parts", c_int64),
        ("group", c_int64),
    )


class ModelRecord(NativeRecord):
    """The layers of a model, and the layers' sizes."""

    native_name = "Model"
    _fields_ = (
        ("layers", c_void_p),
        ("count", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("item_bytes", c_int64),
        ("slots", c_int64),
        ("rotary_dims", c_int64),
        ("rotates_neighbours", c_int64),
        ("whole_norms", c_int64),
        ("one_order", c_int64),
        ("gated_attention", c_int64),
        ("activation", c_int64),
        ("recurrences", RecurrencesRecord),
    )


class ProductTargetsRecord(NativeRecord):
    """Addresses of ``LoraTargets.numbers`` for each product of a layer, null where no adapter changes the product."""

    native_name = "ProductTargets"
    _fields_ = (
        ("qkv", c_void_p),
        ("o", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class LayersStepRecord(NativeRecord):
    """A step of all layers."""

    native_name = "LayersStep"
    _fields_ = (
        ("rows", c_int64),
        ("samples", c_int64),
        ("sample_rows", c_void_p),
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv", c_void_p),
        ("kv_bytes", c_int64),
        ("layer_stride", c_int64),
        ("block_stride", c_int64),
        ("block_tokens", c_int64),
        ("slot_blocks", c_void_p),
        ("slot_offsets", c_void_p),
        ("row_starts", c_void_p),
        ("contexts", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("sequences", c_int64),
        ("adapters", c_void_p),
        ("sample_adapters", c_void_p),
        ("targets", ProductTargetsRecord),
        ("extras", c_void_p),
        ("sample_extras", c_void_p),
        ("all_targets", ProductTargetsRecord),
        ("recurrence_targets", ProductTargetsRecord),
        ("all_recurrence_targets", ProductTargetsRecord),
        ("states", c_void_p),
        ("resumed", c_void_p),
        ("conv_offsets", c_void_p),
        ("state_offsets", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("delta", c_void_p),
        ("gate_up", c_void_p),
        ("gated", c_void_p),
        ("ordered", c_void_p),
        ("gates", c_void_p),
        ("convolved", c_void_p),
        ("decay", c_void_p),
        ("beta", c_void_p),
    )


RECORDS: tuple[type[NativeRecord], ...] = (
    WeightRecord,
    GroupRecord,
    AdaptersRecord,
    ExtrasRecord,
    LayerRecord,
    RecurrencesRecord,
    ModelRecord,
    ProductTargetsRecord,
    LayersStepRecord,
)
"""Every record, whose sizes :func:`differing_record` compares."""


def differing_record(record_bytes: Any) -> str | None:
    """Return the name of a record that has another size in a library; None if all sizes are equal.

    Args:
        record_bytes: the library's function ``lorikeet_record_bytes``.
    """
    for record in RECORDS:
        if record_bytes(record.native_name.encode()) != ctypes.sizeof(record):
            return record.native_name
    return None
