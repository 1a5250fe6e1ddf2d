"""Limits on a request's times."""

import msgspec


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits that a request should meet, in seconds; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
