"""Random traffic on tiny pools: accounts exact after every step, nothing mixed up, nobody forgotten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorikeet.config import ColdStart, KvAfterFinish, Row
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.request import Request
from lorikeet.engine.scripted import token_by_seed
from lorikeet.scheduling.scheduler import Limits
from tests.support.scripted import Bench, adapter, request

NAMES = ("a", "b", "c", "bad")
PREFIX = list(range(100, 140))


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, moves, drops and steps in any order."""

    @initialize(
        blocks=st.integers(14, 40),
        cold_start=st.sampled_from(ColdStart),
        keep=st.sampled_from(KvAfterFinish),
        repeat=st.integers(1, 6),
        budget=st.integers(3, 20),
    )
    def start(self, blocks: int, cold_start: ColdStart, keep: KvAfterFinish, repeat: int, budget: int) -> None:
        self.bench = Bench(
            blocks=blocks,
            row=Row(cold_start=cold_start, kv_after_finish=keep),
            limits=Limits(max_running=5, max_step_tokens=budget, max_model_tokens=48, max_repeat=repeat),
            failing=frozenset({AdapterDigest("digest-bad")}),
        )
        self.requests: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()

    @rule(
        name=st.sampled_from((*NAMES, None)),
        size=st.integers(1, 6),
        prompt=st.integers(1, 36),
        output=st.integers(1, 16),
        stop=st.integers(0, 999),
        twins=st.integers(1, 2),
    )
    def submit(self, name: str | None, size: int, prompt: int, output: int, stop: int, twins: int) -> None:
        """Twins compute the same tokens at once, so each has copies of the other's blocks."""
        ref = None if name is None else adapter(name, 1 + len(name) // 2)
        first = len(self.requests)
        for count in range(first, first + twins):
            new = request(
                f"r{count}",
                PREFIX[:prompt] + [first] * (size - 1),
                self.bench.clock.now(),
                ref,
                max_tokens=output + 16 * (count - first),
                seed=first,
                stop_token_ids=(stop,),
            )
            self.requests[new.request_id] = new
            self.bench.engine.submit(new)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    def _live(self) -> list[RequestId]:
        ended = self.bench.finished()
        return [r for r in self.requests if r not in ended and r not in self.aborted]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if live := self._live():
            victim = data.draw(st.sampled_from(live))
            self.bench.engine.abort(victim)
            self.aborted.add(victim)

    @rule(name=st.sampled_from(NAMES))
    def drop_adapter(self, name: str) -> None:
        self.bench.engine.drop_adapter(AdapterDigest(f"digest-{name}"))

    @rule(data=st.data())
    def move_away_and_back(self, data: st.DataObject) -> None:
        self.bench.step()
        if live := self._live():
            moved = self.bench.engine.export_request(data.draw(st.sampled_from(live)))
            self.bench.engine.submit(moved)

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "bench"):
            self.bench.memory.check_integrity()
            counts = self.bench.memory.counts()
            assert sum(counts) == self.bench.blocks
            assert min(counts) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        ended = self.bench.finished()
        assert set(ended) == set(self.requests), "a request was forgotten"
        counts = self.bench.memory.counts()
        assert counts.free + counts.cached == self.bench.blocks
        for request_id, asked in self.requests.items():
            self._check(asked, ended[request_id].reason, self.bench.tokens.get(request_id, []))

    def _check(self, asked: Request, reason: FinishReason, tokens: list[int]) -> None:
        prompt = len(asked.prompt_token_ids)
        start = type("Start", (), {"sampling": asked.sampling})
        whole = [token_by_seed(start, prompt + i) for i in range(len(tokens))]  # type: ignore[arg-type]
        assert tokens == whole
        if reason is FinishReason.LENGTH:
            assert len(tokens) == min(asked.sampling.max_tokens, 48 - prompt)
        elif reason is FinishReason.STOP:
            assert tokens[-1] in asked.sampling.stop_token_ids
        elif reason is FinishReason.ERROR:
            assert asked.adapter is not None
            assert asked.adapter.name == "bad"
        else:
            assert asked.request_id in self.aborted


Traffic.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
