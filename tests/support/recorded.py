"""Engines on the scripted executor that write a recording, with time of its own between the turns."""

from pathlib import Path

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.engine.build import assemble
from lorikeet.engine.executor import EngineSizes
from lorikeet.engine.scripted import ScriptedExecutor
from tests.support.profiles import GEOMETRY

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
        blocks: of the arena.
        failing: versions whose load fails.
        sick: requests whose output is not finite.
        engine: settings.
    """

    def __init__(
        self,
        path: Path,
        blocks: int = 64,
        failing: frozenset[AdapterDigest] = frozenset(),
        sick: frozenset[RequestId] = frozenset(),
        **engine: object,
    ) -> None:
        given = {"max_running": 5, "max_step_tokens": 16, "block_tokens": BLOCK_TOKENS, "record": str(path), **engine}
        # Not from 0: a monotonic clock never is there, and it rounds otherwise.
        self.clock = VirtualClock(12_345.678)
        executor = ScriptedExecutor(self.clock, BLOCK_TOKENS, step_s=0.0123, load_s=0.0571, failing=failing, sick=sick)
        sizes = EngineSizes(GEOMETRY, GEOMETRY, blocks, BLOCK_TOKENS, 48, blocks - 12, "none")
        settings = Settings(engine=EngineSettings(**given))  # type: ignore[arg-type]
        self.engine, _, self.notes = assemble(settings, executor, sizes, self.clock)
        self.finished: dict[RequestId, Finished] = {}
        self.evictions = 0

    def step(self, pause_s: float = 0.000_317) -> None:
        """Take one turn, a moment after the last."""
        self.clock.advance(pause_s)
        outputs = self.engine.step()
        self.finished |= {event.request_id: event for event in outputs.events if isinstance(event, Finished)}
        if not self.engine.is_busy and self.engine.stats().inflight_blocks:
            self.engine.wait_for_load()

    def run(self) -> None:
        """Step until all has ended, and close the recording."""
        for _ in range(2_000):
            self.step()
            if not (self.engine.has_requests or self.engine.is_busy or self.engine.stats().inflight_blocks):
                self.engine.close()
                return
        raise AssertionError("it does not come to an end")
