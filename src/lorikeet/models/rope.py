"""Which rotary position embedding a checkpoint asks for. ``rotary.py`` computes it."""

import math

import msgspec

from lorikeet.models.checkpoint import Settings

SCALINGS = ("default", "linear", "llama3", "yarn")


class RopeScaling(msgspec.Struct, frozen=True):
    """Base and scaling of the rotary embedding.

    Attributes:
        theta: base of the wavelengths.
        kind: one of ``SCALINGS``.
        factor: how many times longer sequences may become.
        original_tokens: context before scaling (llama3, yarn).
        low_freq_factor, high_freq_factor: band that llama3 blends between scaled and unscaled.
        beta_fast, beta_slow: rotations over the original context between which yarn blends.
        truncate: yarn rounds that band outwards to whole dimensions.
        attention_factor: multiplies cos and sin (yarn).
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


def read_rope(settings: Settings) -> tuple[RopeScaling, int]:
    """Return the rotary embedding and the context in tokens that a ``config.json`` asks for.

    Understands ``rope_theta`` beside ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).

    Raises:
        ModelConfigError: a kind of scaling that is not supported, or one of its values is missing.
    """
    context = settings.integer("max_position_embeddings", 2048)
    name = "rope_parameters" if settings.get("rope_parameters") is not None else "rope_scaling"
    section = settings.section(name) or Settings({}, name)
    theta = section.number("rope_theta", settings.number("rope_theta", 10_000.0))
    kind = section.string("rope_type", section.string("type", "default"))
    if kind not in SCALINGS:
        raise settings.error(name, f"{kind!r} is not supported, only {', '.join(SCALINGS)}")
    for owner in (section, settings):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise owner.error("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeScaling(theta), context
    factor = section.number("factor")
    if kind == "linear":
        return RopeScaling(theta, kind, factor), context
    original = section.integer("original_max_position_embeddings", context)
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
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
    # Checkpoints that are to be stretched keep their old length in max_position_embeddings.
    return scaling, max(context, round(original * factor))


def _yarn_attention_factor(section: Settings, factor: float) -> float:
    """Return what cos and sin are multiplied by: named, or from the paper's 0.1 ln(factor) + 1."""
    if section.get("attention_factor") is not None:
        return section.number("attention_factor")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    return temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
