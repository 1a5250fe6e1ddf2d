"""Admission policies by name. A new policy is one file here and one entry in the table."""

from dataclasses import replace
from functools import partial
from typing import Any

from lorikeet.scheduling.admission import AdmissionPolicy
from lorikeet.scheduling.multilevel.options import AdapterCharge, ChameleonOptions
from lorikeet.scheduling.multilevel.queue import ChameleonQueue
from lorikeet.scheduling.multilevel.quotas import OverloadRule, SurplusShare
from lorikeet.scheduling.multilevel.size_classes import OUTPUT_ONLY_WEIGHTS, KRule
from lorikeet.scheduling.policies.bounded_sjf import BoundedShortestFirst
from lorikeet.scheduling.policies.deadline import EarliestDeadline
from lorikeet.scheduling.policies.fair import FairShares, by_adapter
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.policies.priority import PriorityFirst
from lorikeet.scheduling.policies.sjf import AGING_TOKENS_PER_S, ShortestFirst

_CHAMELEON = ChameleonOptions(charge=AdapterCharge.SHARED, overcommit=2.0, join_from=0.25, largest_percentile=95.0)
_CHAMELEON_VARIANTS: dict[str, dict[str, Any]] = {
    "literal": {"k_rule": KRule.LITERAL},
    "lazy": {"lazy_squash": True},
    "literal-lazy": {"k_rule": KRule.LITERAL, "lazy_squash": True},
    "output-only": {"weights": OUTPUT_ONLY_WEIGHTS},
    "priority-shares": {"share": SurplusShare.PRIORITY},
    "smallest-first": {"overload": OverloadRule.SMALLEST_FIRST},
    "largest": {"largest_percentile": 100.0},
    "charge-per-request": {"charge": AdapterCharge.PER_REQUEST},
    "charge-if-absent": {"charge": AdapterCharge.IF_ABSENT},
    "no-overcommit": {"overcommit": 1.0},
    "no-joining": {"join_from": float("inf")},
}

ADMISSION: dict[str, AdmissionPolicy] = {
    "fifo": Fifo,
    "bounded-sjf": BoundedShortestFirst,
    "sjf": ShortestFirst,
    "sjf:aging": partial(ShortestFirst, gamma=AGING_TOKENS_PER_S),
    "fair": FairShares,
    "fair:literal": partial(FairShares, spare=0.0),
    "fair:adapter": partial(FairShares, owner=by_adapter),
    "priority": PriorityFirst,
    "deadline": EarliestDeadline,
    "chameleon": partial(ChameleonQueue, options=_CHAMELEON),
    **{
        f"chameleon:{name}": partial(ChameleonQueue, options=replace(_CHAMELEON, **change))
        for name, change in _CHAMELEON_VARIANTS.items()
    },
}
"""The values of a preset's ``admission``."""
