"""Simulates one engine of a cluster, on a separate clock."""

import math
from typing import NamedTuple

import msgspec

from lorikeet.bench.replicas import ModelledReplica
from lorikeet.cluster.migration.problem import MovableRequest
from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import DropAdapter, ImportKv, RegisterAdapters, StepOutputs, Submit
from lorikeet.core.request import Request
from lorikeet.engine.process import STATS_EVERY_S

_MARGIN = 1.1
"""Factor by which a step may be longer than the last step, because contexts grow."""

EPOCH = 0
"""Incarnation of every simulated engine. Engines are not restarted."""


EngineMessage = Submit | ImportKv | RegisterAdapters | DropAdapter
"""Messages to an engine."""


class PendingMove(NamedTuple):
    """Describes a request that will be moved.

    Attributes:
        request: the request at the review.
        target: replica to which the request will move.
    """

    request: MovableRequest
    target: ReplicaId


class SimulatedReplica:
    """Runs a modelled engine, with an inbox of messages that the engine has not received yet.

    The replica's clock is at the end of its last turn. While the clock is ahead of the simulation's time, the turn is
    running. Messages sent during a turn are received with the next turn, as in an engine process.

    Args:
        replica_id: id of the replica.
        made: the engine.
        max_batch: largest number of requests in a step.

    Attributes:
        engine, sizes, notes: engine, sizes and notes of the replica.
        is_turning: whether a turn is running.
        turn_s: time at which the next turn begins; infinity if no turn is scheduled.
        leaving: requests to move when the running turn has ended.
        busy_s: total seconds of turns that ran work.
    """

    def __init__(self, replica_id: ReplicaId, made: ModelledReplica, max_batch: int) -> None:
        self.id = replica_id
        self.engine, self.sizes, self.notes, *_ = made.replica
        self._clock = made.clock
        self._executor = made.executor
        self._coalesced = made.coalesced
        self._max_batch = max_batch
        self._inbox: list[EngineMessage] = []
        self._stats_due_s = -math.inf
        self._step_s = 0.0
        self.is_turning = False
        self.turn_s = math.inf
        self.leaving: list[PendingMove] = []
        self.busy_s = 0.0

    def info(self) -> ReplicaInfo:
        """Return the replica's sizes for the fleet."""
        sizes = self.sizes
        return ReplicaInfo(
            replica=self.id,
            epoch=EPOCH,
            total_tokens=sizes.total_blocks * sizes.block_size,
            max_batch=self._max_batch,
            kv_token_bytes=sizes.block_bytes / sizes.block_size,
        )

    def send(self, message: EngineMessage) -> None:
        """Send a message. The caller schedules a turn of an idle replica."""
        self._inbox.append(message)

    def turn(self, now: float, until_s: float) -> tuple[StepOutputs, float]:
        """Receive messages and run a turn that begins now. Return its outputs and the time of its end.

        Identical steps are run together as long as they are expected, from the last step, to end by ``until_s``. A step
        that ends later is a separate turn, so that all tokens before ``until_s`` are reported by then.

        Args:
            now: a time at or after the end of the last turn.
            until_s: time before which no message reaches the engine (see ``Engine.step``). Ignored if the engine
                repeats steps like a live engine.

        Raises:
            ExecutorError: the step failed.
        """
        self._clock.wait_until(now)
        for message in self._inbox:
            match message:
                case Submit(request):
                    self.engine.submit(request)
                case ImportKv():
                    self.engine.import_kv(message)
                case RegisterAdapters(adapters):
                    self.engine.register_adapters(adapters)
                case DropAdapter(digest):
                    self.engine.drop_adapter(digest)
        self._inbox.clear()
        last_begins_s = max(now, until_s - self._step_s * _MARGIN)
        outputs = self.engine.step(last_begins_s if self._coalesced else None)
        end_s = self._clock.now()
        if self.engine.is_busy:
            self.busy_s += end_s - now
        if outputs.tokens:
            steps = max(len(output.tokens) for output in outputs.tokens)
            self._step_s = (end_s - now) / steps
        if end_s >= self._stats_due_s or not self.engine.is_busy:
            outputs = msgspec.structs.replace(outputs, stats=self.engine.stats())
            self._stats_due_s = end_s + STATS_EVERY_S
        return outputs, end_s

    def next_turn_s(self, now: float) -> float:
        """Return the time at which the next turn begins if no message is sent before it. The last turn has ended."""
        if self._inbox:
            return now
        if not self.engine.has_requests and not self.engine.has_chores:
            return math.inf
        if self.engine.is_busy:
            return now
        transfer_s = self._executor.next_transfer_s()
        return max(now, min(self.engine.due_s, math.inf if transfer_s is None else transfer_s))

    def withdraw(self, request_id: RequestId, now: float) -> Request:
        """Remove and return a request of this replica while no turn runs. The caller schedules a turn.

        Raises:
            KeyError: unknown request.
        """
        for message in self._inbox:
            if isinstance(message, Submit) and message.request.request_id == request_id:
                self._inbox.remove(message)
                return message.request
        self._clock.wait_until(now)
        return self.engine.export_request(request_id)

    def export_with_kv(self, request_id: RequestId, now: float) -> Request | None:
        """Export a request with its KV, and return it. Return None if the engine has not received it yet."""
        self._clock.wait_until(now)
        return self.engine.export_with_kv(request_id)
