"""Admission policies by name. A new policy is one file here and one entry in the table."""

from functools import partial

from lorikeet.scheduling.admission import AdmissionPolicy
from lorikeet.scheduling.multilevel.options import MultilevelOptions
from lorikeet.scheduling.multilevel.queue import ChameleonQueue
from lorikeet.scheduling.multilevel.size_aware import SizeAwareQueue
from lorikeet.scheduling.multilevel.size_classes import OUTPUT_ONLY_WEIGHTS
from lorikeet.scheduling.policies.bounded_sjf import BoundedShortestFirst
from lorikeet.scheduling.policies.deadline import EarliestDeadline
from lorikeet.scheduling.policies.fair import FairShares, by_adapter
from lorikeet.scheduling.policies.fifo import Fifo
from lorikeet.scheduling.policies.priority import PriorityFirst
from lorikeet.scheduling.policies.s_lora import ReservedTokens
from lorikeet.scheduling.policies.sjf import AGING_TOKENS_PER_S, ShortestFirst

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
    "s-lora": ReservedTokens,
    "chameleon": ChameleonQueue,
    "chameleon:output-only": partial(ChameleonQueue, options=MultilevelOptions(weights=OUTPUT_ONLY_WEIGHTS)),
    "size-aware": SizeAwareQueue,
}
"""The values of a preset's ``admission``."""
