"""Admission policies by name. A new one is one file and one line here."""

from dataclasses import replace
from functools import partial
from typing import Any

from lorikeet.scheduling.admission import AdmissionPolicy
from lorikeet.scheduling.multilevel.classes import KRule
from lorikeet.scheduling.multilevel.options import Charge, Options
from lorikeet.scheduling.multilevel.queue import ChameleonQueue
from lorikeet.scheduling.multilevel.quotas import Overload, Share
from lorikeet.scheduling.multilevel.sizes import OUTPUT_ONLY
from lorikeet.scheduling.policies.deadline import EarliestDeadline
from lorikeet.scheduling.policies.fair import FairShares, by_adapter
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.policies.priority import PriorityFirst
from lorikeet.scheduling.policies.sjf import AGING_TOKENS_PER_S, ShortestFirst

_CHAMELEON = Options(charge=Charge.SHARED, overcommit=2.0, join_from=0.25, largest_percentile=95.0)
_OTHER_CHAMELEONS: dict[str, dict[str, Any]] = {
    "literal": {"k_rule": KRule.LITERAL},
    "lazy": {"lazy_squash": True},
    "literal-lazy": {"k_rule": KRule.LITERAL, "lazy_squash": True},
    "output-only": {"weights": OUTPUT_ONLY},
    "priority-shares": {"share": Share.PRIORITY},
    "smallest-first": {"overload": Overload.SMALLEST_FIRST},
    "largest": {"largest_percentile": 100.0},
    "charge-per-request": {"charge": Charge.PER_REQUEST},
    "charge-if-absent": {"charge": Charge.IF_ABSENT},
    "no-overcommit": {"overcommit": 1.0},
    "no-joining": {"join_from": float("inf")},
}

ADMISSION: dict[str, AdmissionPolicy] = {
    "fifo": Fifo,
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
        for name, change in _OTHER_CHAMELEONS.items()
    },
}
"""What a row's ``admission`` may name."""
