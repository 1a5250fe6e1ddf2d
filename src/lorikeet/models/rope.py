"""Reads base and scaling of rotary embeddings from a ``config.json``. Does not import torch."""

import math

import msgspec

from lorikeet.models.json_section import JsonSection

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


class RopeScaling(msgspec.Struct, frozen=True):
    """The base and scaling of a rotary embedding.

    Attributes:
        theta: base of the wavelengths.
        kind: one of ``SCALINGS``.
        factor: factor by which the context is extended.
        original_tokens: context in tokens before scaling (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: the band in which llama3 blends scaled and unscaled frequencies.
        beta_fast, beta_slow: numbers of rotations over the original context between which yarn blends.
        truncate: whether yarn rounds that band outwards to whole dimensions.
        attention_factor: factor of cos and sin (yarn, longrope).
        divisors: the divisor of each frequency (longrope).
        long_divisors: the divisors for sequences of more than ``original_tokens`` tokens.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


def read_rope(settings: JsonSection) -> tuple[RopeScaling, int]:
    """Return the rotary embedding and the context in tokens of a ``config.json``.

    Reads ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).

    Raises:
        ModelConfigError: the kind of scaling is not supported, a value is missing, or the two forms contradict each
            other.
    """
    sections = {name: settings.section(name) for name in ("rope_parameters", "rope_scaling")}
    thetas = (section.get("rope_theta") for section in sections.values() if section is not None)
    theta = next((each for each in thetas if each is not None), settings.number("rope_theta", 10_000.0))
    found = [_read_section(settings, name, section, theta) for name, section in sections.items() if section is not None]
    if len(found) > 1 and found[0] != found[1]:
        raise settings.error("rope_scaling", "differs from rope_parameters; remove one of them")
    return found[0] if found else (RopeScaling(theta), _context(settings))


def _context(settings: JsonSection) -> int:
    return settings.integer("max_position_embeddings", 2048)


def _read_section(settings: JsonSection, name: str, section: JsonSection, base: float) -> tuple[RopeScaling, int]:
    """Return embedding and context of one section for :func:`read_rope`. ``base`` is theta if the section has none."""
    context = _context(settings)
    if any(isinstance(value, dict) for value in settings.get(name).values()):
        raise settings.unsupported(name, "different embeddings for different layers are not supported")
    theta = section.number("rope_theta", base)
    kind = section.string("rope_type", section.string("type", "default"))
    kind = "longrope" if kind == "su" else kind  # This is the first name of the kind.
    if kind not in SCALINGS:
        raise settings.unsupported(name, f"{kind!r} is not supported, only {', '.join(SCALINGS)}")
    if kind == "default":
        return RopeScaling(theta), context
    if kind == "longrope":
        return _long_rope(settings, section, theta, context), context
    factor = section.number("factor")
    if kind == "linear":
        return RopeScaling(theta, kind, factor), context
    beside = settings.integer("original_max_position_embeddings", context)
    original = section.integer("original_max_position_embeddings", beside)
    if settings.get("original_max_position_embeddings") is not None and beside != original:
        raise settings.error("original_max_position_embeddings", f"is {beside} here and {original} in {name}")
    if kind == "llama3":
        low = section.number("low_freq_factor")
        high = section.number("high_freq_factor")
        return RopeScaling(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high), context
    scaling = RopeScaling(
        theta,
        kind,
        factor,
        original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(section, factor),
    )
    # Some checkpoints with yarn have the original context in max_position_embeddings.
    return scaling, max(context, round(original * factor))


def _long_rope(settings: JsonSection, section: JsonSection, theta: float, context: int) -> RopeScaling:
    """Return LongRoPE's scaling (https://arxiv.org/abs/2402.13753) for short sequences, as in Phi-3's configs."""
    key = "original_max_position_embeddings"
    original = settings.integer(key, section.integer(key, context))
    factor = section.number("factor", context / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = []
    for key in ("short_factor", "long_factor"):
        values = section.get(key)
        if not isinstance(values, list) or not all(isinstance(each, int | float) and each > 0 for each in values):
            raise section.error(key, f"must be a list of numbers above 0, not {values!r}")
        divisors.append(tuple(float(each) for each in values))
    return RopeScaling(
        theta,
        "longrope",
        factor,
        original,
        attention_factor=section.number("attention_factor", attention),
        divisors=divisors[0],
        long_divisors=divisors[1],
    )


def _yarn_attention_factor(section: JsonSection, factor: float) -> float:
    """Return the factor of cos and sin: the config's, or the paper's 0.1 ln(factor) + 1."""
    if section.get("attention_factor") is not None:
        return section.number("attention_factor")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = section.number("mscale", 0.0)
    mscale_all = section.number("mscale_all_dim", 0.0)
    return temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
