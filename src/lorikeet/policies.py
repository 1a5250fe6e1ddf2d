"""Lists the product's policies by name, for each option of a preset that names a policy.

A new policy is one file and one line here. Policies of papers (``lorikeet.papers``) and of other packages are found by
their entry points; see ``lorikeet.plugins``. A class is imported when a preset names it.
"""

from typing import TYPE_CHECKING, Any

from lorikeet.plugins import PolicyRegistry

if TYPE_CHECKING:
    from lorikeet.cluster.placement.base import PlacementPolicy
    from lorikeet.cluster.routing.base import RoutingPolicy
    from lorikeet.memory.policies.base import EvictionPolicy, PrefetchPolicy
    from lorikeet.scheduling.admission import AdmissionQueue
    from lorikeet.scheduling.batching.mode import BatchingMode

EVICTION: PolicyRegistry["EvictionPolicy"] = PolicyRegistry(
    "lorikeet.eviction",
    "eviction policy",
    {"lru": "lorikeet.memory.policies.lru:Lru", "lru:reuse": "lorikeet.memory.policies.lru:LruWithReuse"},
)
"""Which adapters and KV are evicted first."""

PREFETCH: PolicyRegistry["PrefetchPolicy"] = PolicyRegistry(
    "lorikeet.prefetch",
    "prefetch policy",
    {
        "none": "lorikeet.memory.policies.base:PrefetchPolicy",
        "all": "lorikeet.memory.policies.all_prefetch:AllPrefetch",
        "newest-first": "lorikeet.memory.policies.prefetch:NewestFirst",
        "queue": "lorikeet.memory.policies.queue_prefetch:QueuePrefetch",
    },
)
"""Which adapters and KV are loaded before a request waits for them."""

ADMISSION: PolicyRegistry["AdmissionQueue"] = PolicyRegistry(
    "lorikeet.admission",
    "admission policy",
    {
        "fifo": "lorikeet.scheduling.policies.fifo:Fifo",
        "bounded-sjf": "lorikeet.scheduling.policies.bounded_sjf:BoundedShortestFirst",
        "fair": "lorikeet.scheduling.policies.fair:FairShares",
        "priority": "lorikeet.scheduling.policies.priority:PriorityFirst",
        "deadline": "lorikeet.scheduling.policies.deadline:EarliestDeadline",
    },
)
"""Which of the waiting requests is tried next."""

BATCHING: PolicyRegistry["BatchingMode"] = PolicyRegistry(
    "lorikeet.batching",
    "batching mode",
    {
        "unmerged": "lorikeet.scheduling.batching.mode:Unmerged",
        "merge-paid": "lorikeet.scheduling.batching.merge_paid:MergePaid",
    },
)
"""Which requests run together, and whether their adapter is merged into the base weights."""

PLACEMENT: PolicyRegistry["PlacementPolicy"] = PolicyRegistry(
    "lorikeet.placement",
    "placement policy",
    {
        "everywhere": "lorikeet.cluster.placement.everywhere:FullReplication",
        "rank-groups": "lorikeet.cluster.placement.by_rank:RankGroups",
    },
    constructor="build",
)
"""Which replicas of a cluster serve which adapter."""

ROUTING: PolicyRegistry["RoutingPolicy"] = PolicyRegistry(
    "lorikeet.routing",
    "routing policy",
    {
        "random": "lorikeet.cluster.routing.plain:RandomChoice",
        "round-robin": "lorikeet.cluster.routing.plain:RoundRobin",
        "least-loaded": "lorikeet.cluster.routing.plain:LeastLoaded",
        "table": "lorikeet.cluster.routing.by_table:ByTable",
        "adapter-affinity": "lorikeet.cluster.routing.affinity:AdapterAffinity",
        "kv-affinity": "lorikeet.cluster.routing.affinity:KvAffinity",
        "seconds": "lorikeet.cluster.routing.seconds:FewestSeconds",
        "placed-work": "lorikeet.cluster.routing.placed_work:PlacedWork",
        "consistent": "lorikeet.cluster.routing.consistent:Consistent",
    },
    constructor="build",
)
"""Which of the replicas placed for its adapter gets a request."""

POLICIES: dict[str, PolicyRegistry[Any]] = {
    "eviction": EVICTION,
    "prefetch": PREFETCH,
    "admission": ADMISSION,
    "batching": BATCHING,
    "placement": PLACEMENT,
    "routing": ROUTING,
}
"""The policies by the option of a preset that names one."""
