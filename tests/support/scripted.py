"""Builders for engines on the scripted executor and a virtual clock."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lorikeet.core.adapter import AdapterExtra, AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.events import AdapterEvent, Finished, RequestEvent
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.core.messages import ExportedKv
from lorikeet.core.plan import PACKING_ORDER, LoadOrder, StepPlan, Transfer
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.assist_costs import AssistCosts, AssistRecord
from lorikeet.engine.build import memory_options
from lorikeet.engine.driver import wait_for_work
from lorikeet.engine.loop import Engine
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.kv_events import BlockTokens
from lorikeet.memory.memory import Memory
from lorikeet.policies import ADMISSION, BATCHING
from lorikeet.presets import ColdStart, Preset
from lorikeet.scheduling.assist_planner import AssistPlanner
from lorikeet.scheduling.engine_load import EngineLoad
from lorikeet.scheduling.scheduler import Scheduler
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted_executor import ScriptedExecutor, TokenScript, token_by_seed

BLOCK_TOKENS = 4


def adapter(name: str, blocks: int = 1, extra_blocks: int = 0) -> AdapterRef:
    """An adapter that takes ``blocks`` blocks (its rank says so here), and more for what is not low rank."""
    extras = (AdapterExtra("weight", "o", 1, (extra_blocks,)),) if extra_blocks else ()
    ranks = {"q": (blocks,)} if blocks else {}
    return AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", ranks, 0, extras)


def blocks_of(ref: AdapterRef) -> int:
    """The blocks of an adapter."""
    return ref.max_rank + sum(sum(extra.rows) for extra in ref.extras)


def request(
    name: str, prompt: list[int], arrival_s: float = 0.0, adapter: AdapterRef | None = None, **sampling: object
) -> Request:
    """A request with few words."""
    params = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    return Request(RequestId(name), prompt, params, arrival_s, adapter)


class ScriptedAssist(AssistPlanner):
    """Assists every prefill whose adapter has more than one block."""

    def __init__(self, costs: AssistCosts) -> None:
        self.costs = costs
        self.record = AssistRecord()

    def load_order(self, ref: AdapterRef, tokens: int) -> LoadOrder:
        """Load the first block of the adapter last."""
        return LoadOrder(((1, ref.max_rank), (0, 1))) if ref.max_rank > 1 else PACKING_ORDER


@dataclass
class Bench:
    """An engine and all that it said."""

    blocks: int = 64
    host_blocks: int = 0
    preset: Preset = field(default_factory=Preset)
    limits: SchedulerLimits = field(
        default_factory=lambda: SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    )
    script: TokenScript = token_by_seed
    failing: frozenset[AdapterDigest] = frozenset()
    fails: Callable[[Transfer], bool] = lambda transfer: False
    sick: frozenset[RequestId] = frozenset()
    switch_s: float = 0.0
    assist: AssistCosts | None = None
    block_tokens: BlockTokens | None = None
    state_blocks: int = 0
    token_s: float = 0.0
    image_tokens: int = 64

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        load = EngineLoad()
        self.memory = Memory(
            self.blocks,
            self.host_blocks,
            BLOCK_TOKENS,
            block_bytes=1024,
            adapter_size=lambda ref: AdapterSize(blocks_of(ref), 1024 * blocks_of(ref)),
            eviction=self.preset.eviction,
            prefetch=self.preset.prefetch,
            options=memory_options(self.preset),
            forecast=load,
            tokens=self.block_tokens,
            state_blocks=self.state_blocks,
            image_tokens=self.image_tokens,
        )
        assist = None if self.assist is None else ScriptedAssist(self.assist)
        batching = BATCHING[self.preset.batching]
        self.scheduler = Scheduler(
            self.memory, load, ADMISSION[self.preset.admission], self.limits, self.preset, batching, assist
        )
        self.executor = ScriptedExecutor(
            self.clock,
            BLOCK_TOKENS,
            self.script,
            failing=self.failing,
            fails=self.fails,
            sick=self.sick,
            switch_s=self.switch_s,
            token_s=self.token_s,
        )
        self.plans: list[StepPlan] = []
        self.engine = Engine(
            self.scheduler,
            self.memory,
            self.executor,
            self.clock,
            self.preset.cold_start,
            lambda plan, result: self.plans.append(plan),
        )
        self.tokens: dict[RequestId, list[int]] = {}
        self.events: list[RequestEvent] = []
        self.adapter_events: list[AdapterEvent] = []
        self.exported_kv: dict[RequestId, ExportedKv] = {}

    def step(self) -> None:
        """One turn, with the accounts checked after it."""
        outputs = self.engine.step()
        for output in outputs.tokens:
            tokens = self.tokens.setdefault(output.request_id, [])
            assert output.index == len(tokens), f"token {output.index} of {output.request_id} out of order"
            tokens += [token.token_id for token in output.tokens]
        self.events += outputs.events
        self.adapter_events += outputs.adapter_events
        self.exported_kv |= {exported_kv.request_id: exported_kv for exported_kv in outputs.exported_kv}
        self.memory.check_integrity()
        if not self.engine.is_busy and self.engine.has_transfers:
            wait_for_work(self.engine, self.clock, math.inf)

    def run(self, steps: int = 1_000) -> None:
        """Step until every request and every transfer has ended."""
        for _ in range(steps):
            self.step()
            if not (self.engine.has_requests or self.engine.is_busy or self.engine.has_transfers):
                return
        raise AssertionError(f"still {self.scheduler.stats()}")

    def finished(self) -> dict[RequestId, Finished]:
        """How each request ended."""
        ended = [event for event in self.events if isinstance(event, Finished)]
        assert len({event.request_id for event in ended}) == len(ended), "a request ended twice"
        return {event.request_id: event for event in ended}


__all__ = ["BLOCK_TOKENS", "Bench", "ColdStart", "adapter", "request"]
