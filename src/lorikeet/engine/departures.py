"""Requests that leave an engine with their KV."""

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import Departed
from lorikeet.core.request import Request
from lorikeet.engine.executor import Executor
from lorikeet.memory.leases import SequenceLease
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import BASE


class Departures:
    """Those that have been let go, and whose KV is on its way to the host tier, from where it is handed over.

    Args:
        memory: holds the KV meanwhile.
        executor: reads it.
    """

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor
        self._leaving: dict[RequestId, SequenceLease] = {}

    def begin(self, request: Request, now: float) -> None:
        """Gather the KV of a request that is no longer here."""
        memory = self._memory
        adapter = BASE if request.adapter is None else memory.know(request.adapter)
        keys = memory.keys_of(request.digest, request.prompt_token_ids + request.output_token_ids)
        self._leaving[request.request_id] = memory.travel.gather(adapter, keys, now)

    def adapters(self) -> set[AdapterDigest | None]:
        """Return the versions whose KV is held."""
        return {self._memory.tree.digest(lease.adapter) for lease in self._leaving.values()}

    def take(self, now: float) -> tuple[Departed, ...]:
        """Return those whose KV has been gathered since the last call; some or all of it may be lacking."""
        ready = [request_id for request_id, lease in self._leaving.items() if lease.is_ready]
        return tuple(self._hand_over(request_id, now) for request_id in ready)

    def _hand_over(self, request_id: RequestId, now: float) -> Departed:
        lease = self._leaving.pop(request_id)
        blocks = self._memory.travel.gathered(lease)
        contents = self._executor.read_host(blocks)
        self._memory.release(lease, now)
        return Departed(request_id, tuple(lease.keys[: len(blocks)]), contents)
