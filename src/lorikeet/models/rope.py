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
        ModelConfigError: a kind of scaling that is not supported, one of its values is missing, or two places say
            different things.
    """
    sections = {name: settings.section(name) for name in ("rope_parameters", "rope_scaling")}
    if (partial := settings.number("partial_rotary_factor", 1.0)) != 1.0:
        raise settings.error("partial_rotary_factor", f"only 1.0 is supported, not {partial:g}")
    thetas = (section.get("rope_theta") for section in sections.values() if section is not None)
    theta = next((each for each in thetas if each is not None), settings.number("rope_theta", 10_000.0))
    found = [_read_section(settings, name, section, theta) for name, section in sections.items() if section is not None]
    if len(found) > 1 and found[0] != found[1]:
        raise settings.error("rope_scaling", "says something else than rope_parameters; remove one of them")
    return found[0] if found else (RopeScaling(theta), _context(settings))


def _context(settings: Settings) -> int:
    return settings.integer("max_position_embeddings", 2048)


def _read_section(settings: Settings, name: str, section: Settings, base: float) -> tuple[RopeScaling, int]:
    """See ``read_rope``; ``base`` is what holds if the section names none."""
    context = _context(settings)
    if any(isinstance(value, dict) for value in settings.get(name).values()):
        raise settings.error(name, "embeddings of their own for some layers are not supported")
    theta = section.number("rope_theta", base)
    kind = section.string("rope_type", section.string("type", "default"))
    if kind not in SCALINGS:
        raise settings.error(name, f"{kind!r} is not supported, only {', '.join(SCALINGS)}")
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.error("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeScaling(theta), context
    factor = section.number("factor")
    if kind == "linear":
        return RopeScaling(theta, kind, factor), context
    beside = settings.integer("original_max_position_embeddings", context)
    original = section.integer("original_max_position_embeddings", beside)
    if settings.get("original_max_position_embeddings") is not None and beside != original:
        raise settings.error("original_max_position_embeddings", f"is {beside} here and {original} in {name}")
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
