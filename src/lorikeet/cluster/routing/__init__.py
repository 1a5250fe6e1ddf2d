"""Routing policies by name. A new one is one file and one line here."""

from collections.abc import Callable
from functools import partial

from lorikeet.cluster.routing.affinity import AdapterAffinity, KvAffinity
from lorikeet.cluster.routing.base import RoutingOptions, RoutingPolicy
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.dlora import PendingTime
from lorikeet.cluster.routing.loraserve import LeastAddedLatency, PlacedWork
from lorikeet.cluster.routing.plain import FewestTokens, FirstFit, LeastLoaded, RandomChoice, RoundRobin
from lorikeet.cluster.routing.seconds import FewestSeconds
from lorikeet.cluster.routing.toppings import Toppings


def _toppings(options: RoutingOptions, *, empty_is_free: bool) -> Toppings:
    """Build TOPPINGS.

    If an empty prefill takes its fixed time, the first request of a queue adds only the cost of its rank; if it is
    free, the first request is charged for all of it.
    """
    if options.prefill is None or options.decode is None:
        raise ValueError("Routing toppings needs performance models of prefill and decode")
    return Toppings(
        options.prefill,
        options.decode,
        options.slo_s,
        prompt_tokens=options.mean_tokens[0],
        empty_is_free=empty_is_free,
    )


def _seconds(options: RoutingOptions) -> FewestSeconds:
    if options.costs is None:
        raise ValueError("Routing seconds needs the costs of a replica")
    return FewestSeconds(options.costs, options.kernel_form)


ROUTING: dict[str, Callable[[RoutingOptions], RoutingPolicy]] = {
    "random": lambda options: RandomChoice(options.seed),
    "round-robin": lambda _: RoundRobin(),
    "table": lambda options: ByTable(options.seed),
    "first-fit": lambda _: FirstFit(),
    "least-loaded": lambda _: LeastLoaded(),
    "fewest-tokens": lambda _: FewestTokens(),
    "adapter-affinity": lambda _: AdapterAffinity(),
    "kv-affinity": lambda _: KvAffinity(),
    "seconds": _seconds,
    "toppings": partial(_toppings, empty_is_free=False),
    "toppings:empty-free": partial(_toppings, empty_is_free=True),
    "placed-work": lambda _: PlacedWork(),
    "loraserve:toppings-rank": lambda _: LeastAddedLatency(),
    "dlora": lambda options: PendingTime(options.load_s, options.load_bytes_per_s),
}
"""The values of a preset's ``routing``."""
