"""The scripted executor of the engine's tests accepts valid plans, and detects each broken rule."""

import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, AdapterName, BlockId, RequestId
from lorikeet.core.plan import SequenceStart, SequenceStep, StepPlan, StepResult, Tier, Transfer, TransferDone
from lorikeet.core.request import SamplingParams
from tests.support.scripted_executor import ScriptedExecutor, token_by_seed

BLOCK_TOKENS = 4
X, Y = (AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", {"q": (2,)}, 0) for name in "xy")
PROMPT = list(range(2 * BLOCK_TOKENS))
"""Two blocks of tokens."""


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def read_to_host(number: int, host: tuple[int, ...], ref: AdapterRef | None = X, *, demand: bool = True) -> Transfer:
    return Transfer(number, Tier.SOURCE, Tier.HOST, blocks(*host), (), ref, demand)


def load(number: int, device: tuple[int, ...], host: tuple[int, ...] = (), ref: AdapterRef | None = X) -> Transfer:
    return Transfer(number, Tier.SOURCE, Tier.DEVICE, blocks(*host), blocks(*device), ref)


def fetch(number: int, host: tuple[int, ...], device: tuple[int, ...], ref: AdapterRef | None = None) -> Transfer:
    return Transfer(number, Tier.HOST, Tier.DEVICE, blocks(*host), blocks(*device), ref)


def store(number: int, device: tuple[int, ...], host: tuple[int, ...]) -> Transfer:
    return Transfer(number, Tier.DEVICE, Tier.HOST, blocks(*host), blocks(*device))


class Hand:
    """A scripted executor driven by hand."""

    def __init__(self, **given: object) -> None:
        self.clock = VirtualClock()
        self.executor = ScriptedExecutor(self.clock, BLOCK_TOKENS, **given)  # type: ignore[arg-type]

    def plan(self, **fields: object) -> StepResult:
        return self.executor.execute(StepPlan(0, **fields))  # type: ignore[arg-type]

    def begin(self, *transfers: Transfer) -> None:
        self.plan(transfers=transfers)

    def move(self, *transfers: Transfer) -> list[TransferDone]:
        """Begin transfers and let them end, one after the other."""
        ended = []
        for transfer in transfers:
            self.begin(transfer)
            self.executor.wait_for_transfer(None)
            ended += self.executor.completed_transfers()
        assert [done.transfer_id for done in ended] == [transfer.transfer_id for transfer in transfers]
        return ended

    def compute(
        self,
        name: str,
        table: tuple[int, ...],
        start: int = 0,
        ref: AdapterRef | None = None,
        prompt: list[int] = PROMPT,
    ) -> None:
        """Compute what is left of a prompt in one step; ``start`` tokens are in the first blocks of ``table``."""
        digest = None if ref is None else ref.digest
        sequence = SequenceStart(RequestId(name), prompt, len(prompt), SamplingParams(max_tokens=9), digest)
        step = SequenceStep(RequestId(name), start, len(prompt) - start, blocks(*table), samples=True)
        self.plan(starts=(sequence,), sequences=(step,))

    def go_on(self, name: str, position: int, *new_blocks: int) -> None:
        """Compute the token at ``position``."""
        self.plan(sequences=(SequenceStep(RequestId(name), position, 1, blocks(*new_blocks), samples=True),))


# --- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "routes",
    [
        (load(1, (0, 1)),),
        (load(1, (0, 1), (8, 9)),),
        (read_to_host(1, (8, 9)), fetch(2, (8, 9), (0, 1), X)),
        (load(1, (4, 5), (8, 9)), fetch(2, (8, 9), (0, 1), X)),
    ],
    ids=["at once", "through the host", "from the host", "from the host, where it passed through"],
)
def test_weights_can_be_used_after_every_route(routes: tuple[Transfer, ...]) -> None:
    hand = Hand()
    hand.move(*routes)
    hand.compute("a", (2, 3), ref=X)


def test_an_adapter_that_is_not_there_cannot_be_used() -> None:
    with pytest.raises(ExecutorError, match="a: adapter digest-x is not loaded"):
        Hand().compute("a", (2, 3), ref=X)


def test_an_adapter_on_its_way_cannot_be_used() -> None:
    hand = Hand()
    hand.begin(load(1, (0, 1)))
    with pytest.raises(ExecutorError, match="is not loaded"):
        hand.compute("a", (2, 3), ref=X)


def test_an_adapter_on_the_host_alone_cannot_be_used() -> None:
    hand = Hand()
    hand.move(read_to_host(1, (0, 1)))
    with pytest.raises(ExecutorError, match="is not loaded"):
        hand.compute("a", (2, 3), ref=X)


def test_an_evicted_adapter_cannot_be_used() -> None:
    hand = Hand()
    hand.move(load(1, (0, 1)))
    hand.plan(evictions=(X.digest,))
    with pytest.raises(ExecutorError, match="is not loaded"):
        hand.compute("a", (2, 3), ref=X)


def test_an_adapter_on_its_way_cannot_be_evicted() -> None:
    hand = Hand()
    hand.begin(load(1, (0, 1)))
    with pytest.raises(ExecutorError, match="digest-x is evicted, but still on its way"):
        hand.plan(evictions=(X.digest,))


def test_weights_that_kv_was_written_over_cannot_be_used() -> None:
    hand = Hand()
    hand.move(load(1, (0, 1)))
    hand.compute("a", (1, 2))
    with pytest.raises(ExecutorError, match="block 1 no longer holds adapter digest-x"):
        hand.compute("b", (4, 5), ref=X)


def test_weights_fetched_from_blocks_of_another_adapter_cannot_be_used() -> None:
    hand = Hand()
    hand.move(read_to_host(1, (8, 9)), read_to_host(2, (9, 10), Y), fetch(3, (8, 9), (0, 1), X))
    with pytest.raises(ExecutorError, match="block 1 no longer holds adapter digest-x"):
        hand.compute("a", (2, 3), ref=X)


def test_weights_in_another_order_cannot_be_used() -> None:
    hand = Hand()
    hand.move(read_to_host(1, (8, 9)), fetch(2, (9, 8), (0, 1), X))
    with pytest.raises(ExecutorError, match="block 0 no longer holds adapter digest-x"):
        hand.compute("a", (2, 3), ref=X)


# --- KV -----------------------------------------------------------------------------------------------


def test_kv_is_readable_with_the_same_tokens_under_the_same_adapter() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.compute("b", (0, 2), start=BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("ref", "prompt"),
    [(X, PROMPT), (None, [99, *PROMPT[1:]])],
    ids=["another adapter", "another token"],
)
def test_kv_is_not_readable_with_other_tokens_or_another_adapter(ref: AdapterRef | None, prompt: list[int]) -> None:
    hand = Hand()
    hand.move(load(1, (8, 9)))
    hand.compute("a", (0, 1))
    with pytest.raises(ExecutorError, match="block 0 holds other KV than token 0's"):
        hand.compute("b", (0, 2), start=BLOCK_TOKENS, ref=ref, prompt=prompt)


def test_kv_comes_back_from_the_host_into_other_blocks() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.move(store(1, (0, 1), (5, 6)), fetch(2, (5, 6), (7, 3)))
    hand.compute("b", (7, 2), start=BLOCK_TOKENS)


def test_kv_that_was_stored_stays_as_it_was_when_its_old_block_is_written() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.move(store(1, (0,), (5,)))
    hand.compute("b", (0, 2), prompt=[7] * len(PROMPT))
    hand.move(fetch(2, (5,), (3,)))
    hand.compute("c", (3, 4), start=BLOCK_TOKENS)


def test_writes_after_a_copy_are_not_in_the_copy() -> None:
    hand = Hand(script=lambda start, position: 100 + position)
    hand.compute("a", (0, 1), prompt=PROMPT[:6])
    hand.move(store(1, (1,), (5,)))
    hand.go_on("a", 6)
    hand.move(fetch(2, (5,), (3,)))
    longer = [*PROMPT[:6], 106, 7]
    with pytest.raises(ExecutorError, match="block 3 holds other KV than token 6's"):
        hand.compute("b", (0, 3), start=7, prompt=longer)
    hand.compute("c", (0, 1), start=7, prompt=longer)


@pytest.mark.parametrize(
    "between",
    [store(2, (1,), (5,)), read_to_host(2, (5,), Y)],
    ids=["other KV", "weights"],
)
def test_kv_of_a_reused_host_block_is_read_wrongly_later(between: Transfer) -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.move(store(1, (0,), (5,)), between, fetch(3, (5,), (3,)))
    with pytest.raises(ExecutorError, match="block 3 holds other KV than token 0's"):
        hand.compute("b", (3, 4), start=BLOCK_TOKENS)


def test_kv_on_its_way_in_cannot_be_read_though_the_block_held_the_very_same() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.compute("a's twin", (3, 2))
    hand.move(store(1, (0,), (5,)))
    hand.begin(fetch(2, (5,), (3,)))
    with pytest.raises(ExecutorError, match="block 3 holds other KV"):
        hand.compute("b", (3, 4), start=BLOCK_TOKENS)


def test_kv_on_its_way_out_can_be_read() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.begin(store(1, (0,), (5,)))
    hand.compute("b", (0, 2), start=BLOCK_TOKENS)


@pytest.mark.parametrize("moved", [store(2, (1,), (5,)), fetch(2, (6,), (1,))], ids=["out of", "into"])
def test_kv_cannot_be_written_into_a_block_of_a_transfer(moved: Transfer) -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    hand.begin(moved)
    with pytest.raises(ExecutorError, match="KV is written into block 1, which is part of a transfer"):
        hand.compute("b", (1, 2), prompt=[5])


def test_sequence_continues_in_a_block_after_its_copy_has_ended() -> None:
    hand = Hand()
    hand.compute("a", (0, 1), prompt=PROMPT[:-2])
    hand.move(store(1, (1,), (5,)))
    hand.go_on("a", len(PROMPT) - 2)


# --- transfers beside each other ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        (load(1, (0, 1)), load(2, (1, 2), ref=Y), "writes .*, which is part of another"),
        (read_to_host(1, (0, 1)), store(2, (5,), (1,)), "writes .*, which is part of another"),
        (store(1, (0,), (5,)), fetch(2, (6,), (0,)), "writes .*, which is part of another"),
        (fetch(1, (5,), (0,)), store(2, (1,), (5,)), "writes .*, which is part of another"),
        (read_to_host(1, (5, 6)), fetch(2, (5, 6), (0, 1), X), "reads .*, which another still writes"),
        (load(1, (0, 1), (5, 6)), fetch(2, (5, 6), (2, 3), X), "reads .*, which another still writes"),
        (fetch(1, (5,), (0,)), store(2, (0,), (6,)), "reads .*, which another still writes"),
    ],
)
def test_a_block_belongs_to_a_transfer_until_it_is_reported(first: Transfer, second: Transfer, complaint: str) -> None:
    hand = Hand()
    hand.begin(first)
    hand.clock.advance(10.0)
    with pytest.raises(ExecutorError, match=f"transfer 2 {complaint}"):
        hand.begin(second)
    hand = Hand()
    hand.move(first)
    hand.begin(second)


def test_a_block_can_be_copied_to_several_places_at_once() -> None:
    hand = Hand()
    hand.begin(store(1, (0,), (5,)), store(2, (0,), (6,)))
    hand.clock.advance(10.0)
    hand.executor.completed_transfers()
    hand.compute("a", (0, 1))


@pytest.mark.parametrize(
    "transfer",
    [
        fetch(1, (5, 6), (0,)),
        fetch(1, (), ()),
        load(1, (0, 1), (5,)),
        load(1, (0, 1), ref=None),
        read_to_host(1, ()),
        Transfer(1, Tier.SOURCE, Tier.HOST, blocks(1), blocks(1), X),
        Transfer(1, Tier.DEVICE, Tier.HOST, blocks(1), blocks(1), X),
        Transfer(1, Tier.DEVICE, Tier.DEVICE, (), blocks(1)),
        Transfer(1, Tier.HOST, Tier.SOURCE, blocks(1), (), X),
    ],
    ids=lambda transfer: f"{transfer.source} to {transfer.target}",
)
def test_a_transfer_has_the_blocks_of_its_route(transfer: Transfer) -> None:
    with pytest.raises(ExecutorError, match="the blocks of transfer 1 do not fit its route"):
        Hand().begin(transfer)


def test_a_transfer_names_no_block_twice() -> None:
    with pytest.raises(ExecutorError, match="transfer 1 names a block twice"):
        Hand().begin(load(1, (0, 0)))


def test_numbers_of_transfers_rise() -> None:
    hand = Hand()
    hand.move(load(2, (0, 1)))
    with pytest.raises(ExecutorError, match="transfer 2 comes after transfer 2"):
        hand.begin(load(2, (2, 3), ref=Y))


def test_only_running_transfers_are_urgent() -> None:
    hand = Hand()
    hand.begin(read_to_host(1, (0, 1), demand=False))
    hand.plan(urgent=(1,))
    hand.executor.wait_for_transfer(None)
    hand.executor.completed_transfers()
    with pytest.raises(ExecutorError, match="transfer 1 is urgent, but not under way"):
        hand.plan(urgent=(1,))


# --- failures and times -------------------------------------------------------------------------------


def test_a_version_that_fails_can_be_read_to_neither_tier() -> None:
    hand = Hand(failing={X.digest})
    assert [done.error for done in hand.move(load(1, (0, 1)), read_to_host(2, (5, 6)))] == ["scripted failure"] * 2
    with pytest.raises(ExecutorError, match="is not loaded"):
        hand.compute("a", (2, 3), ref=X)


def test_blocks_of_a_failed_transfer_are_unknown() -> None:
    hand = Hand(fails=lambda transfer: transfer.transfer_id == 2)
    hand.compute("a", (0, 1))
    hand.compute("b", (2, 3), prompt=PROMPT)
    hand.move(store(1, (0,), (5,)))
    assert hand.move(fetch(2, (5,), (2,)))[0].error == "scripted failure"
    with pytest.raises(ExecutorError, match="block 2 holds other KV"):  # though it held this very KV before
        hand.compute("c", (2, 4), start=BLOCK_TOKENS)
    hand.move(fetch(3, (5,), (2,)))
    hand.compute("d", (2, 4), start=BLOCK_TOKENS)


def test_reads_and_copies_take_their_time_and_directions_run_in_parallel() -> None:
    hand = Hand(load_s=0.5, copy_s=0.1)
    hand.compute("a", (0, 1))
    began_s = hand.clock.now()
    hand.begin(load(1, (2, 3), (5, 6)), store(2, (0, 1), (7, 8)), fetch(3, (9,), (4,)))
    ended = {}
    for _ in range(3):
        hand.executor.wait_for_transfer(None)
        for done in hand.executor.completed_transfers():
            ended[done.transfer_id] = hand.clock.now() - began_s, done.duration_s
    assert {number: times[0] for number, times in ended.items()} == pytest.approx({3: 0.1, 2: 0.2, 1: 0.7})
    assert {number: times[1] for number, times in ended.items()} == pytest.approx({3: 0.1, 2: 0.2, 1: 0.7})


def test_waiting_ends_with_the_time_or_the_transfer() -> None:
    hand = Hand(load_s=0.5)
    hand.begin(load(1, (0, 1)))
    hand.executor.wait_for_transfer(0.2)
    assert hand.clock.now() == 0.2
    hand.executor.wait_for_transfer(10.0)
    assert hand.clock.now() == 0.5
    hand.executor.completed_transfers()
    with pytest.raises(ExecutorError, match="a transfer is awaited, and none is under way"):
        hand.executor.wait_for_transfer(None)


# --- sequences ----------------------------------------------------------------------------------------


def test_a_sequence_is_started_once() -> None:
    hand = Hand()
    hand.compute("a", (0, 1))
    with pytest.raises(ExecutorError, match="a is started twice"):
        hand.compute("a", (2, 3))


def test_tokens_follow_the_script_and_sick_requests_get_none() -> None:
    start = SequenceStart(RequestId("a"), [1, 2], 2, SamplingParams(max_tokens=9, seed=3), None)
    plan = StepPlan(
        0,
        starts=(start, SequenceStart(RequestId("b"), [1, 2], 2, SamplingParams(max_tokens=9), None)),
        sequences=tuple(SequenceStep(RequestId(n), 0, 2, blocks(i), samples=True) for i, n in enumerate("ab")),
    )
    result = ScriptedExecutor(VirtualClock(), BLOCK_TOKENS, sick={RequestId("b")}).execute(plan)
    assert [[token.token_id for token in tokens] for tokens in result.tokens] == [[token_by_seed(start, 2)], []]
    assert set(result.failed) == {"b"}
