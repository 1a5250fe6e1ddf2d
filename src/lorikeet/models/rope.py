"""Rotary position embeddings: which scaling a checkpoint asks for, and its frequencies.

Rotary embeddings: https://arxiv.org/abs/2104.09864. YaRN: https://arxiv.org/abs/2309.00071.
"""

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

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return the angle per position, in radians, of each of the ``head_dim / 2`` pairs."""
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.kind == "yarn":
            low, high = self._yarn_band(head_dim)
            return [self._yarn(frequency, pair, low, high) for pair, frequency in enumerate(plain)]
        return plain

    def _llama3(self, frequency: float) -> float:
        """Keep short wavelengths, divide long ones by the factor, blend linearly in the rotations between."""
        rotations = self.original_tokens * frequency / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequency / self.factor, frequency, kept)

    def _yarn(self, frequency: float, pair: int, low: float, high: float) -> float:
        """Keep the pairs below the band, divide those above by the factor, blend linearly inside."""
        return _blend(frequency, frequency / self.factor, (pair - low) / (high - low))

    def _yarn_band(self, head_dim: int) -> tuple[float, float]:
        """Return the pairs that rotate ``beta_fast`` and ``beta_slow`` times over the original context."""

        def pair_of(rotations: float) -> float:
            return head_dim * math.log(self.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001


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


def _blend(start: float, end: float, share: float) -> float:
    share = min(max(share, 0.0), 1.0)
    return start + share * (end - start)
