"""A profile in slow motion: for paced replicas that are too many for the cores that they run on."""

from typing import Any

import msgspec

from lorikeet.core.slo import Slo
from lorikeet.costs.profile import CostProfile, Curve, Figure, OperatingLoads


def stretched(profile: CostProfile, factor: float) -> CostProfile:
    """Return the profile of a device on which everything takes ``factor`` times as long.

    A replica by it does what one by ``profile`` does, later, as long as all else that is a time is stretched alike:
    arrivals, limits, periods of placement, what its settings say. Times measured there are divided by the factor.

    Args:
        profile: of the device.
        factor: more than 0; above 1 for slow motion.

    Raises:
        ValueError: the factor is not positive.
    """
    if factor <= 0:
        raise ValueError(f"a profile cannot be stretched by {factor}")
    if factor == 1:
        return profile
    longer: CostProfile = _longer(profile, factor)
    return msgspec.structs.replace(
        longer, name=f"{profile.name}*{factor:g}", origin=f"{profile.origin}; all times × {factor:g}"
    )


def stretched_slo(slo: Slo, factor: float) -> Slo:
    """Return limits that are ``factor`` times as long."""
    limits = {name: limit and limit * factor for name, limit in msgspec.structs.asdict(slo).items()}
    return Slo(**limits)


def _longer(value: Any, factor: float) -> Any:
    match value:
        case Figure():
            times = _times(value.unit, factor)
            error = None if value.error is None else value.error * times
            return msgspec.structs.replace(value, value=value.value * times, error=error)
        case Curve():
            return msgspec.structs.replace(value, points=tuple((count, s * factor) for count, s in value.points))
        case OperatingLoads():
            loads = {rank: tokens_per_s / factor for rank, tokens_per_s in value.tokens_per_s.items()}
            return msgspec.structs.replace(value, slo=stretched_slo(value.slo, factor), tokens_per_s=loads)
        case msgspec.Struct():
            changed = {name: _longer(each, factor) for name, each in msgspec.structs.asdict(value).items()}
            return msgspec.structs.replace(value, **changed)
        case dict():
            return {key: _longer(each, factor) for key, each in value.items()}
        case tuple():
            return tuple(_longer(each, factor) for each in value)
    return value


def _times(unit: str, factor: float) -> float:
    """Return what becomes of a figure of that unit."""
    if unit == "s" or unit.startswith("s/"):
        return factor
    return 1 / factor if unit.endswith("/s") else 1.0
