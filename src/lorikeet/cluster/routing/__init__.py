"""Routing policies by name. A new one is one file and one line here."""

from collections.abc import Callable

import msgspec

from lorikeet.cluster.routing.affinity import AdapterAffinity, KvAffinity
from lorikeet.cluster.routing.base import Router, RoutingOptions
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.dlora import PendingTime
from lorikeet.cluster.routing.loraserve import FewestTokens, LeastAddedLatency
from lorikeet.cluster.routing.plain import FirstFit, LeastLoaded, RandomChoice, RoundRobin
from lorikeet.cluster.routing.toppings import Toppings


def _toppings(options: RoutingOptions) -> Toppings:
    if options.prefill is None or options.decode is None:
        raise ValueError("Routing toppings needs performance models of prefill and decode")
    return Toppings(options.prefill, options.decode, options.slo_s)


def _toppings_no_intercept(options: RoutingOptions) -> Toppings:
    """The same, but an empty queue takes as long as the fixed part of a prefill: it adds only what ranks add."""
    if options.prefill is None:
        return _toppings(options)
    prefill = msgspec.structs.replace(options.prefill, fixed_s=0.0)
    return _toppings(msgspec.structs.replace(options, prefill=prefill))


ROUTING: dict[str, Callable[[RoutingOptions], Router]] = {
    "random": lambda options: RandomChoice(options.seed),
    "round-robin": lambda _: RoundRobin(),
    "table": lambda options: ByTable(options.seed),
    "first-fit": lambda _: FirstFit(),
    "least-loaded": lambda _: LeastLoaded(),
    "adapter-affinity": lambda _: AdapterAffinity(),
    "kv-affinity": lambda _: KvAffinity(),
    "toppings": _toppings,
    "loraserve:toppings": lambda _: FewestTokens(),
    "loraserve:toppings-rank": lambda _: LeastAddedLatency(),
    "dlora": lambda options: PendingTime(options.load_s, options.load_bytes_per_s),
    "toppings:no-intercept": _toppings_no_intercept,
}
"""What a row's ``routing`` may name."""
