"""Groups the parts from which the client of a cluster is made."""

from collections.abc import Callable
from typing import NamedTuple

from lorikeet.client.supervisor import EngineHost
from lorikeet.cluster.adapters.transport import Transport
from lorikeet.cluster.controller.adopter import Adoption
from lorikeet.cluster.controller.learned_costs import LearnedCosts
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.placement.service import PlacementService
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.core.ids import ReplicaId


class ClusterProcesses(NamedTuple):
    """Holds the parts that depend on how replicas are started: as local processes or by Ray.

    Attributes:
        hosts: returns the host that runs a replica's engines.
        transport: copies adapters between replicas.
        placement: the orchestrator, which decides which replicas serve an adapter.
        adoption: claims replicas of other servers; None if replicas end with their server.
    """

    hosts: Callable[[ReplicaId], EngineHost]
    transport: Transport
    placement: PlacementService
    adoption: Adoption | None = None


class ClusterPolicies(NamedTuple):
    """Holds the policies of the preset that the client applies.

    Attributes:
        routing: chooses the replica of a request.
        period_s: seconds between two placements.
        prefetch: whether replicas fetch the adapters of a new placement immediately.
        held_share: limit of the bytes of all copies; see ``Dispatcher``.
    """

    routing: RoutingPolicy
    period_s: float
    prefetch: bool = False
    held_share: float = 1.0


class ClusterCosts(NamedTuple):
    """Holds measured costs, and the costs by which the client decides whether to move a request.

    Attributes:
        times: times of moves.
        kv_bandwidth: estimate of the KV bandwidth, updated by every transfer.
        learned: measured costs of steps and loads; None if no policy needs costs.
    """

    times: MoveTimes
    kv_bandwidth: KvBandwidth
    learned: LearnedCosts | None = None
