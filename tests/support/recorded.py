"""Engines on the scripted executor that write a recording, with time of its own between the turns."""

import math
from pathlib import Path

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.engine.build import assemble
from lorikeet.engine.driver import wait_for_work
from tests.support.profiles import GEOMETRY
from tests.support.scripted_executor import ScriptedExecutor

BLOCK_TOKENS = 4
RANKS_OF_A_BLOCK = 2


def adapter(name: str, blocks: int = 1) -> AdapterRef:
    """An adapter that takes ``blocks`` blocks of ``GEOMETRY``."""
    ranks = {"q": (RANKS_OF_A_BLOCK * blocks,) * GEOMETRY.layers}
    return AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", ranks, 0)


class RecordedEngine:
    """An engine that records, as ``assemble`` builds it.

    Args:
        path: the recording.
        blocks, host_blocks: of the arenas.
        failing: versions that cannot be read.
        broken_transfers: ids of transfers that fail for another reason.
        sick: requests whose output is not finite.
        async_scheduling: whether it returns after each step of a plan, while the next one runs.
        engine: settings.
    """

    def __init__(
        self,
        path: Path,
        blocks: int = 64,
        host_blocks: int = 0,
        failing: frozenset[AdapterDigest] = frozenset(),
        broken_transfers: frozenset[int] = frozenset(),
        sick: frozenset[RequestId] = frozenset(),
        async_scheduling: bool = False,
        **engine: object,
    ) -> None:
        given = {
            "max_num_seqs": 5,
            "max_num_batched_tokens": 16,
            "block_size": BLOCK_TOKENS,
            "record": str(path),
            **engine,
        }
        # Not from 0: a monotonic clock never is there, and it rounds otherwise.
        self.clock = VirtualClock(12_345.678)
        executor = ScriptedExecutor(
            self.clock,
            BLOCK_TOKENS,
            step_s=0.0123,
            load_s=0.0571,
            copy_s=0.00191,
            failing=failing,
            fails=lambda transfer: transfer.transfer_id in broken_transfers,
            sick=sick,
        )
        sizes = EngineSizes(
            GEOMETRY,
            GEOMETRY,
            blocks,
            host_blocks,
            BLOCK_TOKENS,
            48,
            blocks - 12,
            "none",
            async_scheduling=async_scheduling,
        )
        settings = Settings(engine=EngineSettings(**given))  # type: ignore[arg-type]
        self.engine, _, self.notes, *_ = assemble(settings, executor, sizes, self.clock)
        self.finished: dict[RequestId, Finished] = {}
        self.evictions = 0

    def step(self, pause_s: float = 0.000_317) -> None:
        """Take one turn, a moment after the last."""
        self.clock.advance(pause_s)
        outputs = self.engine.step()
        self.finished |= {event.request_id: event for event in outputs.events if isinstance(event, Finished)}
        if not self.engine.is_busy and self.engine.has_transfers:
            wait_for_work(self.engine, self.clock, math.inf)

    def run(self) -> None:
        """Step until all has ended, and close the recording."""
        for _ in range(2_000):
            self.step()
            if not (self.engine.has_requests or self.engine.is_busy or self.engine.has_transfers):
                self.engine.close()
                return
        raise AssertionError("it does not come to an end")
