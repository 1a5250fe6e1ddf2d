"""What an engine tells over its channel, as the fleet takes it."""

from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.gauges import Gauges
from lorikeet.core.events import AdapterLoaded, Admitted, Finished, FinishReason, Preempted
from lorikeet.core.ids import ReplicaId
from lorikeet.core.messages import EngineStats, StepOutputs


def gauges(replica: ReplicaId, epoch: int, stats: EngineStats, block_size: int) -> Gauges:
    """Return an engine's gauges as routing sees them; KV and adapters that no request needs may leave."""
    needed = {*stats.running_adapters, *stats.waiting_adapters}
    idle_blocks = sum(blocks for digest, blocks in stats.resident_adapters.items() if digest not in needed)
    return Gauges(
        replica=replica,
        epoch=epoch,
        number=round(stats.at_s * 1e6),
        requests=stats.running + stats.waiting,
        free_tokens=(stats.free_blocks + stats.cached_blocks + idle_blocks) * block_size,
        resident=frozenset(stats.resident_adapters),
    )


def hear(fleet: Fleet, replica: ReplicaId, outputs: StepOutputs) -> None:
    """Take in what an engine told after a step, except its gauges."""
    for output in outputs.tokens:
        fleet.generated(replica, output.request_id, len(output.tokens))
    for event in outputs.events:
        match event:
            case Admitted():
                fleet.admitted(replica, event.request_id, event.at_s)
            case Preempted():
                fleet.preempted(replica, event.request_id)
            case Finished():
                is_complete = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
                fleet.ended(replica, event.request_id, event.at_s, is_complete=is_complete)
            case _:
                pass
    for adapter_event in outputs.adapter_events:
        if not isinstance(adapter_event, AdapterLoaded):
            fleet.evicted(replica, adapter_event.digest)
        elif adapter_event.error is None:
            fleet.loaded(replica, adapter_event.digest)
