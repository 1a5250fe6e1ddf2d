"""The orders of adapters that ``/v1/stats`` and ``lorikeet top`` offer; it imports nothing else of the API."""

from enum import StrEnum


class SortBy(StrEnum):
    """Order of the adapters."""

    SLOWNESS = "slowness"
    TRAFFIC = "traffic"
    WAITS = "waits"
    RESIDENCY = "residency"
    TIER = "tier"
    HITS = "hits"
    ERRORS = "errors"
    SAVED = "saved"
    NAME = "name"
