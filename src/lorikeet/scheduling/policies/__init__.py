"""Admission policies by name. A new one is one file and one line here."""

from functools import partial

from lorikeet.scheduling.admission import AdmissionPolicy
from lorikeet.scheduling.multilevel.classes import KRule
from lorikeet.scheduling.multilevel.queue import ChameleonQueue, Charge, Options
from lorikeet.scheduling.multilevel.quotas import Share
from lorikeet.scheduling.multilevel.sizes import OUTPUT_ONLY
from lorikeet.scheduling.policies.deadline import EarliestDeadline
from lorikeet.scheduling.policies.fair import FairShares, by_adapter
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.policies.priority import PriorityFirst
from lorikeet.scheduling.policies.sjf import AGING_TOKENS_PER_S, ShortestFirst

ADMISSION: dict[str, AdmissionPolicy] = {
    "fifo": Fifo,
    "sjf": ShortestFirst,
    "sjf:aging": partial(ShortestFirst, gamma=AGING_TOKENS_PER_S),
    "fair": FairShares,
    "fair:literal": partial(FairShares, spare=0.0),
    "fair:adapter": partial(FairShares, owner=by_adapter),
    "priority": PriorityFirst,
    "deadline": EarliestDeadline,
    "chameleon": ChameleonQueue,
    **{
        f"chameleon:{name}": partial(ChameleonQueue, options=options)
        for name, options in {
            "literal": Options(k_rule=KRule.LITERAL),
            "lazy": Options(lazy_squash=True),
            "literal-lazy": Options(k_rule=KRule.LITERAL, lazy_squash=True),
            "output-only": Options(weights=OUTPUT_ONLY),
            "priority-shares": Options(share=Share.PRIORITY),
            "p99": Options(largest_percentile=99.0),
            "charge-if-absent": Options(charge=Charge.IF_ABSENT),
            "charge-shared": Options(charge=Charge.SHARED),
        }.items()
    },
}
"""What a row's ``admission`` may name."""
