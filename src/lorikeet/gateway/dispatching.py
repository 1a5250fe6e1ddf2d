"""A dispatcher whose replicas may take requests again after they were drained: backends say so by their health."""

from lorikeet.cluster.dispatcher import Actions, Dispatcher
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId


class BackendFleet(Fleet):
    """A fleet whose members may be opened again."""

    def reopen(self, replica_id: ReplicaId) -> None:
        """Send a replica requests again; those that are there stay.

        Raises:
            KeyError: it is not there.
        """
        self._by_id[replica_id].is_open = True
        self._note_open()


class BackendDispatcher(Dispatcher):
    """See the module.

    Args:
        router: see ``Dispatcher``.
        prefetch: see ``Dispatcher``.
    """

    fleet: BackendFleet

    def __init__(self, router: Router, *, prefetch: bool = False) -> None:
        super().__init__(router, prefetch=prefetch)
        self.fleet = BackendFleet()

    def reopen(self, replica: ReplicaId, now: float) -> Actions:
        """Send a replica requests again after a :meth:`drain`.

        Raises:
            KeyError: it is not there.
        """
        self.fleet.reopen(replica)
        # The table that counts, taken once more: those that wait are tried, and what should be there is brought.
        return self.swap(self.router.table or RoutingTable(0, {}), now)
