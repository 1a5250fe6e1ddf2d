"""Snapshots of states: taken where later requests begin, found with the KV up to them, and evicted like KV."""

import msgspec
import pytest

from lorikeet.core.events import Admitted
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import ImportKv
from lorikeet.memory.snapshots import is_snapshot_key, snapshot_keys
from lorikeet.memory.tree import block_keys
from lorikeet.presets import PRESETS, resolve_preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

STATE_BLOCKS = 3
TOKEN_S = 1.0
"""Time of a token, so long beside that of a step that every snapshot pays."""


@pytest.fixture
def bench() -> Bench:
    return Bench(
        blocks=60, host_blocks=60, state_blocks=STATE_BLOCKS, token_s=TOKEN_S, preset=resolve_preset("auto")[1]
    )


def answer(bench: Bench, name: str, prompt: list[int], tokens: int = 2) -> tuple[int, list[int]]:
    """Return the number of cached tokens of a prompt, and the answer."""
    bench.engine.submit(request(name, prompt, bench.clock.now(), adapter("a"), max_tokens=tokens))
    bench.run()
    admitted = [each for each in bench.events if isinstance(each, Admitted) and each.request_id == name]
    return admitted[-1].cached_tokens, bench.tokens[RequestId(name)]


def test_a_prompt_is_found_up_to_its_last_block(bench: Bench) -> None:
    prompt = list(range(4 * BLOCK_TOKENS + 1))
    assert answer(bench, "first", prompt)[0] == 0
    assert answer(bench, "same", prompt)[0] == 4 * BLOCK_TOKENS
    assert answer(bench, "longer", [*prompt, 7, 7, 7])[0] == 4 * BLOCK_TOKENS


def test_a_conversation_goes_on_from_the_end_of_the_answer(bench: Bench) -> None:
    prompt = list(range(2 * BLOCK_TOKENS + 1))
    _, tokens = answer(bench, "turn 1", prompt, 3 * BLOCK_TOKENS)
    known = len(prompt) + len(tokens) - 1
    cached, _ = answer(bench, "turn 2", [*prompt, *tokens, 5, 5, 5])
    assert cached == known // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_short_prompt_takes_no_step_of_its_own_for_a_snapshot() -> None:
    """A step of one token takes as long as a prefill of 40 tokens here, so a snapshot pays from 160 tokens on."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=400, max_model_len=300)
    bench = Bench(blocks=400, state_blocks=STATE_BLOCKS, token_s=0.01 / 39, limits=limits)
    answer(bench, "others", list(range(900, 990)), 20)  # so that times are known
    for tokens, is_cut in ((100, False), (200, True)):
        first = len(bench.plans)
        answer(bench, f"{tokens}", list(range(tokens, 2 * tokens)), 2)
        steps = [step.tokens for plan in bench.plans[first:] for step in plan.sequences]
        assert steps[0] == ((tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS if is_cut else tokens)


def test_decoding_keeps_one_snapshot(bench: Bench) -> None:
    answer(bench, "long", list(range(2 * BLOCK_TOKENS + 1)), 6 * BLOCK_TOKENS)
    tree = bench.memory.tree
    nodes = [node for node in range(1, tree.end) if tree.kind[node] == 3 and is_snapshot_key(tree.key_of(node))]
    assert len(nodes) == 2 * STATE_BLOCKS, "of the prompt, and of the last boundary of the answer"


def test_the_size_of_snapshots_is_counted_on_each_tier(bench: Bench) -> None:
    prompt = list(range(2 * BLOCK_TOKENS + 1))
    answer(bench, "first", prompt)
    answer(bench, "second", prompt)
    stats = bench.memory.stats()
    assert stats.snapshots is not None
    assert (stats.snapshots.taken, stats.snapshots.used) == (1, 1)
    assert stats.snapshots.state_bytes == STATE_BLOCKS * bench.memory.block_bytes
    assert stats.snapshots.device_bytes == stats.snapshots.state_bytes
    assert stats.device.kv_cached == stats.snapshots.device_bytes + 2 * bench.memory.block_bytes
    assert Bench().memory.stats().snapshots is None


def test_a_shared_prefix_gets_a_snapshot_when_it_is_shared(bench: Bench) -> None:
    system = list(range(3 * BLOCK_TOKENS))
    assert answer(bench, "one", [*system, *[1] * (2 * BLOCK_TOKENS)])[0] == 0
    assert answer(bench, "two", [*system, *[2] * (2 * BLOCK_TOKENS)])[0] == 0, "no state was kept there"
    assert answer(bench, "three", [*system, *[3] * (2 * BLOCK_TOKENS)])[0] == 3 * BLOCK_TOKENS


def test_another_adapter_does_not_find_it(bench: Bench) -> None:
    prompt = list(range(4 * BLOCK_TOKENS + 1))
    answer(bench, "first", prompt)
    bench.engine.submit(request("other", prompt, bench.clock.now(), adapter("b"), max_tokens=2))
    bench.run()
    assert [each.cached_tokens for each in bench.events if isinstance(each, Admitted)] == [0, 0]


def test_a_partial_snapshot_is_not_used(bench: Bench) -> None:
    prompt = list(range(4 * BLOCK_TOKENS + 1))
    answer(bench, "first", prompt)
    key = block_keys(adapter("a").digest, prompt, BLOCK_TOKENS)[3]
    node = bench.memory.tree.find(snapshot_keys(key, STATE_BLOCKS)[-1])
    assert node is not None
    bench.memory.evictor.discard([node], bench.clock.now())
    assert answer(bench, "again", prompt)[0] == 0
    assert answer(bench, "and again", prompt)[0] == 4 * BLOCK_TOKENS, "the missing block was taken again"


def test_a_request_moves_with_its_snapshot(bench: Bench) -> None:
    prompt = list(range(4 * BLOCK_TOKENS + 1))
    bench.engine.submit(request("moved", prompt, 0.0, adapter("a"), max_tokens=20))
    while len(bench.tokens.get(RequestId("moved"), ())) < 10:
        bench.step()
    exported = bench.engine.export_with_kv(RequestId("moved"))
    assert exported is not None
    bench.run()
    bench.step()
    kv = bench.exported_kv[RequestId("moved")]
    whole = (len(prompt) + 9) // BLOCK_TOKENS
    assert len(kv.keys) == whole + STATE_BLOCKS
    other = Bench(
        blocks=60, host_blocks=60, state_blocks=STATE_BLOCKS, token_s=TOKEN_S, preset=resolve_preset("auto")[1]
    )
    other.engine.import_kv(ImportKv(exported.adapter, kv.keys, kv.blocks))
    other.engine.submit(exported)
    other.step()
    (admitted,) = [each for each in other.events if isinstance(each, Admitted)]
    assert admitted.cached_tokens == whole * BLOCK_TOKENS
    other.tokens[RequestId("moved")] = bench.tokens[RequestId("moved")]
    other.run()


def test_snapshots_leave_before_running_sequences_are_preempted() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    bench = Bench(blocks=26, state_blocks=STATE_BLOCKS, limits=limits, preset=PRESETS["lorikeet:tree-lru"])
    for number in range(2):
        prompt = [number] * (2 * BLOCK_TOKENS + 1)
        bench.engine.submit(request(f"r{number}", prompt, 0.0, None, max_tokens=30 - len(prompt)))
    bench.run()
    assert not bench.scheduler.preemptions


def test_a_preempted_sequence_resumes_at_its_last_block() -> None:
    bench = Bench(blocks=60, state_blocks=STATE_BLOCKS, token_s=TOKEN_S, preset=resolve_preset("auto")[1])
    prompt = list(range(2 * BLOCK_TOKENS + 1))
    new = request("r", prompt, 0.0, None, max_tokens=20)
    bench.engine.submit(new)
    while len(bench.tokens.get(new.request_id, ())) < 11:
        bench.step()
    moved = bench.engine.export_request(new.request_id)
    assert msgspec.structs.asdict(moved)["output_token_ids"] == bench.tokens[new.request_id]
    bench.engine.submit(moved)
    bench.run()
    last = [each for each in bench.events if isinstance(each, Admitted)][-1]
    assert last.cached_tokens == (len(prompt) + 10) // BLOCK_TOKENS * BLOCK_TOKENS
