"""Random traffic on tiny tiers, under every preset: exact accounts after every step, nothing mixed up or lost.

The scripted executor refuses every plan that would read or move anything but what belongs there.
"""

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import ImportKv
from lorikeet.core.plan import Transfer
from lorikeet.core.request import Pooling, PoolingKind, Request
from lorikeet.memory import swapper, tiers
from lorikeet.memory.tree import NodeKind
from lorikeet.presets import PRESETS
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import Bench, adapter, request
from tests.support.scripted_executor import token_by_seed
from tests.support.step_counts import count, counted, machine_settings

NAMES = ("a", "b", "cccccc", "bad")
PREFIX = list(range(100, 140))
LONGEST = 48


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, moves, drops, replaces, fails and steps in any order."""

    @initialize(
        blocks=st.integers(20, 40),
        host_blocks=st.one_of(st.just(0), st.integers(1, 60)),
        preset=st.sampled_from(sorted(PRESETS)),
        repeat=st.integers(1, 6),
        budget=st.integers(3, 20),
        failing=st.booleans(),
        together=st.sampled_from((1, 3, 32)),
        state_blocks=st.sampled_from((0, 1, 3)),
        token_s=st.sampled_from((0.0, 0.1)),
    )
    def start(
        self,
        blocks: int,
        host_blocks: int,
        preset: str,
        repeat: int,
        budget: int,
        failing: bool,
        together: int,
        state_blocks: int,
        token_s: float,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        for module in (tiers, swapper):
            self.patch.setattr(module, "KV_BLOCKS_PER_TRANSFER", together)
        self.failing = failing
        self.new_bench = partial(
            Bench,
            blocks=blocks,
            host_blocks=host_blocks,
            preset=PRESETS[preset],
            limits=SchedulerLimits(
                max_num_seqs=5, max_num_batched_tokens=budget, max_model_len=LONGEST, num_scheduler_steps=repeat
            ),
            failing=frozenset({AdapterDigest("digest-bad")}),
            fails=self._fails,
            state_blocks=state_blocks,
            token_s=token_s,
        )
        self.bench = self.new_bench()
        self.requests: dict[RequestId, Request] = {}
        self.aborted: set[RequestId] = set()
        self.away: dict[RequestId, Request] = {}
        self.versions = dict.fromkeys(NAMES, 0)

    def _fails(self, transfer: Transfer) -> bool:
        """Let one in ten transfers fail, or none."""
        return self.failing and transfer.transfer_id % 10 == 0

    def _ref(self, name: str) -> AdapterRef:
        """The present version; each takes another number of blocks, low-rank ones and others."""
        version = self.versions[name]
        suffix = f"-{version}" if version else ""
        blocks = 1 + (len(name) + version) % 4
        extra_blocks = min(blocks, (len(name) * 2 + version) % 5)
        return adapter(name + suffix, blocks - extra_blocks, extra_blocks)

    @rule(
        name=st.sampled_from((*NAMES, None)),
        size=st.integers(1, 6),
        family=st.integers(0, 3),
        prompt=st.integers(1, 36),
        output=st.integers(1, 16),
        stop=st.integers(0, 999),
        twins=st.integers(1, 2),
        acts_from=st.one_of(st.just(0), st.integers(1, 36)),
        pooling=st.sampled_from((None, None, *PoolingKind)),
    )
    @counted
    def submit(
        self,
        name: str | None,
        size: int,
        family: int,
        prompt: int,
        output: int,
        stop: int,
        twins: int,
        acts_from: int,
        pooling: PoolingKind | None,
    ) -> None:
        """Twins compute the same tokens at once, so each has copies of the other's blocks.

        Some adapters act on the end of a prompt only, and of some prompts one vector is wanted.
        """
        ref = None if name is None else self._ref(name)
        first = len(self.requests)
        for number in range(first, first + twins):
            new = request(
                f"r{number}",
                [family, *PREFIX[1:prompt], *[first % 7] * (size - 1)],
                self.bench.clock.now(),
                ref,
                max_tokens=output + 16 * (number - first),
                seed=first,
                stop_token_ids=(stop,),
            )
            start = 0 if ref is None else min(acts_from, len(new.prompt_token_ids) - 1)
            wanted = None if pooling is None else Pooling(pooling)
            new = msgspec.structs.replace(new, adapter_start=start, pooling=wanted)
            self.requests[new.request_id] = new
            self.bench.engine.submit(new)

    @rule(names=st.sets(st.sampled_from(NAMES)))
    @counted
    def know(self, names: set[str]) -> None:
        self.bench.engine.register_adapters(tuple(self._ref(name) for name in sorted(names)))

    @rule(steps=st.integers(1, 8))
    @counted
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @rule()
    @counted
    def settle(self) -> None:
        """All requests end; what they leave behind stays."""
        self.bench.run(3_000)

    @rule(seconds=st.floats(0.001, 2.0))
    @counted
    def rest(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)
        self.bench.step()

    def _live(self) -> list[RequestId]:
        ended = self.bench.finished()
        return [r for r in self.requests if r not in ended and r not in self.aborted and r not in self.away]

    @rule(data=st.data())
    @counted
    def abort(self, data: st.DataObject) -> None:
        if live := self._live():
            victim = data.draw(st.sampled_from(live))
            self.bench.engine.abort(victim)
            self.aborted.add(victim)

    @rule(name=st.sampled_from(NAMES))
    @counted
    def drop_adapter(self, name: str) -> None:
        self.bench.engine.drop_adapter(self._ref(name).digest)

    @rule(name=st.sampled_from(NAMES[:-1]))
    @counted
    def replace_adapter(self, name: str) -> None:
        """Another version under the same name; the old one is dropped."""
        self.bench.engine.drop_adapter(self._ref(name).digest)
        self.versions[name] += 1

    @rule(data=st.data())
    @counted
    def move_away_and_back(self, data: st.DataObject) -> None:
        self.bench.step()
        if live := self._live():
            moved = self.bench.engine.export_request(data.draw(st.sampled_from(live)))
            self.bench.engine.submit(moved)

    @rule(data=st.data())
    @counted
    def export_with_kv(self, data: st.DataObject) -> None:
        """A request leaves, and its KV follows when it has been gathered."""
        self.bench.step()
        if live := self._live():
            request_id = data.draw(st.sampled_from(live))
            exported = self.bench.engine.export_with_kv(request_id)
            assert exported is not None
            self.away[request_id] = exported

    @rule(brings=st.booleans())
    @counted
    def come_back(self, brings: bool) -> None:
        """Perhaps with KV that is no longer here, or is still."""
        self.bench.step()
        for request_id in [request_id for request_id in self.away if request_id in self.bench.exported_kv]:
            exported, exported_kv = self.away.pop(request_id), self.bench.exported_kv.pop(request_id)
            if brings:
                count("blocks that exported_kv", len(exported_kv.keys))
                self.bench.engine.import_kv(ImportKv(exported.adapter, exported_kv.keys, exported_kv.blocks))
            self.bench.engine.submit(exported)

    @rule(data=st.data())
    @counted
    def lose_a_leaf(self, data: st.DataObject) -> None:
        """The last block of a branch is freed, be it KV, all of a snapshot or a part of one."""
        tree = self.bench.memory.tree
        leaves = np.flatnonzero((tree.kind[: tree.end] == NodeKind.KV) & (tree.children[: tree.end] == 0)).tolist()
        if leaves:
            self.bench.memory.evictor.discard([data.draw(st.sampled_from(leaves))], self.bench.clock.now())

    @rule()
    @counted
    def die_and_resume(self) -> None:
        """The engine dies, and another gets its requests with the tokens that have arrived, as from the supervisor."""
        live = self._live()
        lost = [request_id for request_id in self.away if request_id not in self.bench.exported_kv]
        dead, self.bench = self.bench, self.new_bench()
        self.bench.clock.wait_until(dead.clock.now())
        self.bench.tokens = dead.tokens
        self.bench.events = dead.events
        self.bench.exported_kv = dead.exported_kv
        for request_id in [*live, *lost]:
            self.away.pop(request_id, None)
            asked = self.requests[request_id]
            tokens = list(dead.tokens.get(request_id, ()))
            count("tokens of resumed requests", len(tokens))
            resumed = msgspec.structs.replace(asked, output_token_ids=tokens, attempt=asked.attempt + 1)
            self.requests[request_id] = resumed
            self.bench.engine.submit(resumed)
        self._end_aborted(dead)

    def _end_aborted(self, dead: Bench) -> None:
        """Note the end of requests that were aborted in the dead engine's last turn."""
        ended = self.bench.finished()
        for request_id in self.aborted:
            if request_id not in ended:
                self.bench.events.append(Finished(request_id, dead.clock.now(), FinishReason.ABORT))

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "bench"):
            self.bench.memory.check_integrity()
            counts, host = self.bench.memory.counts(), self.bench.memory.host_counts()
            assert sum(counts) == self.bench.blocks
            assert sum(host) == self.bench.host_blocks
            assert min(*counts, *host) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        try:
            self._end()
        finally:
            self.patch.undo()

    def _end(self) -> None:
        self.bench.run(3_000)
        self.come_back(brings=True)
        assert not self.away, "a request that was let go never exported_kv"
        self.bench.run(3_000)
        for (source, target), totals in self.bench.memory.tiers.totals.items():
            count(f"{source} to {target}", totals.transfers)
            count(f"{source} to {target}, failed", totals.failed)
        count("snapshots taken", self.bench.memory.snapshots.taken)
        count("snapshots used", self.bench.memory.snapshots.used)
        count("preemptions", self.bench.scheduler.preemptions)
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
            assert len(tokens) == min(asked.sampling.max_tokens, LONGEST - prompt)
        elif reason is FinishReason.STOP and asked.pooling is not None:
            assert not tokens
        elif reason is FinishReason.STOP:
            assert tokens[-1] in asked.sampling.stop_token_ids
        elif reason is FinishReason.ERROR:
            assert asked.adapter is not None
            assert asked.adapter.name == "bad" or self.failing
        else:
            assert asked.request_id in self.aborted


Traffic.TestCase.settings = machine_settings(40, steps=60)
TestTraffic = Traffic.TestCase
