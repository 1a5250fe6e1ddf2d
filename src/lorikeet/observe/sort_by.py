"""Defines the orders of adapters in ``/v1/stats`` and ``lorikeet top``. This module imports nothing else of the API."""

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
