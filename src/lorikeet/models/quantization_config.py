"""Reads the quantisation of a checkpoint from its ``config.json``. Does not import torch."""

from typing import Any, NamedTuple

from lorikeet.models.json_section import JsonSection

AWQ = "awq"
GPTQ = "gptq"
COMPRESSED = "compressed-tensors"
BITSANDBYTES = "bitsandbytes"
FP8 = "fp8"
GGUF = "gguf"
METHODS = (AWQ, GPTQ, COMPRESSED, BITSANDBYTES, FP8)
"""Methods of ``quantization_config`` that are read. ``GGUF`` is a file format of its own."""

ON_LOAD = {"int8": 8, "int4": 4}
"""Bits of the weights that are quantised on load, by the value of ``--quantization``."""

QUANTIZATIONS = ("auto", "none", *ON_LOAD, *METHODS, GGUF)
"""Values of ``model.quantization``."""

ALIASES = {"awq_marlin": AWQ, "gptq_marlin": GPTQ, "compressed_tensors": COMPRESSED, "bnb": BITSANDBYTES}
"""Names that other servers give to their kernels for a method."""


class QuantizationConfig(NamedTuple):
    """The part of a checkpoint's quantisation that does not follow from the tensors.

    Attributes:
        method: one of ``METHODS``.
        bits: bits of a code; 0 if they follow from the tensors.
        group: number of inputs in a group: -1 for all inputs of an output, 0 if it follows from the tensors.
        zeros_are_one_less: whether zero points are stored minus one (the first form of GPTQ).
        block: numbers of outputs and inputs of a block with one scale (fp8); None if they follow from the tensors.
    """

    method: str
    bits: int = 0
    group: int = 0
    zeros_are_one_less: bool = False
    block: tuple[int, int] | None = None


def read_quantization(settings: JsonSection) -> QuantizationConfig | None:
    """Return the quantisation of the checkpoint with this ``config.json``; None if the checkpoint is not quantised.

    Raises:
        ModelConfigError: the method, or one of its options, is not supported.
    """
    key = "quantization_config" if settings.get("quantization_config") is not None else "compression_config"
    section = settings.section(key)
    if section is None:
        return None
    method = section.string("quant_method", COMPRESSED if key == "compression_config" else "")
    method = method.replace("_", "-") if method == "compressed_tensors" else method
    if method not in METHODS:
        raise section.error("quant_method", f"{method!r} is not supported, only {', '.join(METHODS)}")
    return _READERS[method](section)


def _awq(section: JsonSection) -> QuantizationConfig:
    bits = section.integer("bits", section.integer("w_bit", 4))
    if bits != 4:
        raise section.error("bits", f"only 4 is supported for awq, not {bits}")
    if (version := section.string("version", "gemm").lower()) != "gemm":
        raise section.error("version", f"{version!r} is not supported, only 'gemm'")
    if not section.flag("zero_point", default=True):
        raise section.error("zero_point", "weights without zero points are not supported")
    return QuantizationConfig(AWQ, bits, _group(section, section.get("q_group_size", 128)))


def _gptq(section: JsonSection) -> QuantizationConfig:
    bits = section.integer("bits")
    if bits not in (2, 4, 8):
        raise section.error("bits", f"only 2, 4 and 8 are supported for gptq, not {bits}")
    if section.get("dynamic"):
        raise section.error("dynamic", "different settings for different modules are not supported")
    form = section.string("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", f"{form!r} is not supported, only 'gptq' and 'gptq_v2'")
    return QuantizationConfig(GPTQ, bits, _group(section, 128), zeros_are_one_less=form == "gptq")


def _group(section: JsonSection, default: Any) -> int:
    group = section.get("group_size", default)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and (group < 2 or group % 2)):
        raise section.error("group_size", f"must be even, or -1, not {group!r}")
    return group


_COMPRESSED_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "dense")


def _compressed(section: JsonSection) -> QuantizationConfig:
    form = section.string("format", "dense")
    if form not in _COMPRESSED_FORMATS:
        raise section.error("format", f"{form!r} is not supported, only {', '.join(_COMPRESSED_FORMATS)}")
    groups = section.get("config_groups") or {}
    widths = {_bits(section, name, group) for name, group in groups.items()}
    if len(widths) > 1:
        raise section.error("config_groups", "groups of different widths are not supported")
    if section.get("transform_config"):
        raise section.error("transform_config", "transformed weights are not supported")
    return QuantizationConfig(COMPRESSED, widths.pop() if widths else 0)


def _bits(section: JsonSection, name: str, group: Any) -> int:
    weights = (group.get("weights") if isinstance(group, dict) else None) or {}
    bits = weights.get("num_bits", 8)
    if bits not in (4, 8) or (bits == 4 and weights.get("type", "int") != "int"):
        kind = weights.get("type", "int")
        raise section.error("config_groups", f"{name}: weights of {bits!r} bits ({kind}) are not supported")
    return int(bits)


def _bitsandbytes(section: JsonSection) -> QuantizationConfig:
    if section.flag("load_in_8bit") and section.flag("llm_int8_has_fp16_weight"):
        raise section.error("llm_int8_has_fp16_weight", "is not supported")
    return QuantizationConfig(BITSANDBYTES)


def _fp8(section: JsonSection) -> QuantizationConfig:
    block = section.get("weight_block_size")
    if block is None:
        return QuantizationConfig(FP8)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise section.error("weight_block_size", f"must be two sizes, not {block!r}")
    return QuantizationConfig(FP8, block=(block[0], block[1]))


_READERS = {AWQ: _awq, GPTQ: _gptq, COMPRESSED: _compressed, BITSANDBYTES: _bitsandbytes, FP8: _fp8}
