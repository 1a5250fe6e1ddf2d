"""Limits on a request's times."""

import msgspec

_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


class SloError(ValueError):
    """What should be limits is none."""


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits that a request should meet, in seconds; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def parse_slo(text: str) -> Slo:
    """Read ``ttft=0.5,tpot=0.1,e2e=10``, in seconds; any of them, or none.

    Raises:
        SloError: an unknown name, or no number from 0 on.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limit_s = limits[_NAMES[name.strip()]] = float(value)
        except (KeyError, ValueError):
            limit_s = -1.0
        if not limit_s >= 0:
            raise SloError(f"{part!r} is no limit; write for example ttft=0.5,tpot=0.1,e2e=10 (seconds)")
    return Slo(**limits)


def slo_words(slo: Slo) -> str:
    """Return limits as :func:`parse_slo` reads them; empty for none."""
    limits = {name: getattr(slo, field) for name, field in _NAMES.items()}
    return ",".join(f"{name}={limit_s:g}" for name, limit_s in limits.items() if limit_s is not None)
