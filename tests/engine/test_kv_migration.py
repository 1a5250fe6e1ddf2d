"""KV that goes from one engine to another with its request."""

import pytest

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import Abort, ExportedKv, ExportRequest, ImportKv
from lorikeet.core.plan import Tier, Transfer
from lorikeet.core.request import Request
from lorikeet.engine.recording import Received, Record
from lorikeet.memory import tiers
from lorikeet.presets import PRESETS
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

R = RequestId("r")
PROMPT = list(range(100, 118))
"""Four blocks and two tokens."""


def bench(**options: object) -> Bench:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    return Bench(**{"blocks": 40, "host_blocks": 40, "limits": limits, **options})  # type: ignore[arg-type]


def begun(source: Bench, ref: object = None, tokens: int = 3, **sampling: object) -> None:
    """Let a request have so many tokens."""
    source.engine.submit(request(R, PROMPT, 0.0, ref, max_tokens=12, **sampling))  # type: ignore[arg-type]
    while len(source.tokens.get(R, [])) < tokens:
        source.step()


def export_with_kv(source: Bench) -> tuple[Request, ExportedKv]:
    """Let the request go, and wait until its KV has been gathered."""
    exported = source.engine.export_with_kv(R)
    assert exported is not None
    while R not in source.exported_kv:
        source.step()
    return exported, source.exported_kv[R]


def taken_up(source: Bench, exported: Request, exported_kv: ExportedKv, **options: object) -> Bench:
    """Return the engine that the request has ended at, with its KV."""
    target = bench(**options)
    target.tokens[R] = list(source.tokens[R])
    target.engine.import_kv(ImportKv(exported.adapter, exported_kv.keys, exported_kv.blocks))
    target.memory.check_integrity()
    target.engine.submit(exported)
    target.run()
    return target


def alone(ref: object = None) -> list[int]:
    whole = bench()
    whole.engine.submit(request(R, PROMPT, 0.0, ref, max_tokens=12))  # type: ignore[arg-type]
    whole.run()
    return whole.tokens[R]


def first_start(target: Bench) -> int:
    """Tokens whose KV was there when the request began."""
    return next(step.start for plan in target.plans for step in plan.sequences)


@pytest.mark.parametrize("preset", ["lorikeet:plain", "elora", "dlora", "vllm-static", "chameleon"])
def test_a_request_goes_on_elsewhere_with_its_kv(preset: str) -> None:
    """18 tokens of prompt and 3 of answer, of which the last is not computed: five whole blocks travel."""
    ref = adapter("a", 2)
    source = bench(preset=PRESETS[preset])
    begun(source, ref)
    exported, exported_kv = export_with_kv(source)
    computed = len(PROMPT) + len(source.tokens[R]) - 1
    assert len(exported_kv.keys) == len(exported_kv.blocks) == computed // BLOCK_TOKENS == 5
    target = taken_up(source, exported, exported_kv, preset=PRESETS[preset])
    assert first_start(target) == 5 * BLOCK_TOKENS
    assert target.tokens[R] == alone(ref)
    source.run()
    assert not source.engine.has_chores or preset == "elora", "elora's swapper goes on ticking"


def test_source_without_a_host_tier_exports_no_kv_and_target_recomputes() -> None:
    source = bench(host_blocks=0)
    begun(source)
    exported, exported_kv = export_with_kv(source)
    assert (exported_kv.keys, exported_kv.blocks) == ((), ())
    target = taken_up(source, exported, exported_kv)
    assert first_start(target) == 0
    assert target.tokens[R] == alone()


def test_kv_without_room_is_recomputed() -> None:
    small = bench(host_blocks=3)
    begun(small)
    exported, exported_kv = export_with_kv(small)
    assert len(exported_kv.keys) == 3
    source = bench()
    begun(source)
    _, whole = export_with_kv(source)
    for target, brought in ((bench(host_blocks=40), exported_kv), (bench(host_blocks=2), whole)):
        found = taken_up(source, exported, brought, host_blocks=target.host_blocks)
        assert first_start(found) == min(len(brought.keys), found.host_blocks) * BLOCK_TOKENS
        assert found.tokens[R] == alone()


@pytest.mark.parametrize(("together", "failing", "travels"), [(1, 1, 3), (2, 1, 1), (32, 0, 0)])
def test_what_could_not_be_copied_ends_what_travels(
    monkeypatch: pytest.MonkeyPatch, together: int, failing: int, travels: int
) -> None:
    """Of five blocks, the later ones first, the second transfer fails, or the only one."""
    monkeypatch.setattr(tiers, "KV_BLOCKS_PER_TRANSFER", together)
    outs: list[Transfer] = []

    def one_fails(transfer: Transfer) -> bool:
        if transfer.target is Tier.HOST and transfer not in outs:
            outs.append(transfer)
        return outs[failing : failing + 1] == [transfer]

    source = bench(fails=one_fails)
    begun(source)
    exported, exported_kv = export_with_kv(source)
    assert len(exported_kv.keys) == travels
    assert taken_up(source, exported, exported_kv).tokens[R] == alone()


def test_what_is_on_the_host_already_departs_at_once() -> None:
    source = bench()
    begun(source)
    exported, first = export_with_kv(source)
    source.engine.submit(exported)
    source.step()
    again, second = export_with_kv(source)
    assert second == first
    assert again.exports == exported.exports + 1


def test_requests_run_during_kv_import_even_if_cold_start_blocks() -> None:
    source = bench(preset=PRESETS["dlora"])
    begun(source)
    source.engine.submit(request("other", [7] * 6, 0.0, max_tokens=12))
    source.step()
    source.engine.export_with_kv(R)
    before = len(source.tokens[RequestId("other")])
    source.step()
    assert R not in source.exported_kv
    assert len(source.tokens[RequestId("other")]) > before


def test_waiting_request_departs_without_kv_and_an_unknown_one_does_not() -> None:
    source = bench()
    source.engine.submit(request(R, PROMPT))
    exported = source.engine.export_with_kv(R)
    assert exported is not None
    source.step()
    assert source.exported_kv[R].blocks == ()
    assert source.engine.export_with_kv(R) is None
    source.step()
    assert not source.engine.has_requests


def test_an_adapter_is_dropped_when_what_departs_under_it_has() -> None:
    ref = adapter("a", 2)
    source = bench()
    begun(source, ref)
    source.engine.export_with_kv(R)
    source.engine.drop_adapter(AdapterDigest("digest-a"))
    while R not in source.exported_kv:
        source.step()
    assert len(source.exported_kv[R].keys) == 5
    source.run()
    assert source.memory.counts().free == source.blocks
    assert source.memory.host_counts().free == source.host_blocks


def test_kv_that_is_known_is_not_written_again() -> None:
    source = bench()
    begun(source)
    exported, exported_kv = export_with_kv(source)
    target = taken_up(source, exported, exported_kv)
    before = target.memory.host_counts()
    target.engine.import_kv(ImportKv(None, exported_kv.keys, exported_kv.blocks))
    target.memory.check_integrity()
    assert target.memory.host_counts() == before


def test_kv_behind_a_lost_block_is_not_written_again() -> None:
    source = bench()
    begun(source)
    exported, exported_kv = export_with_kv(source)
    target = bench()
    brought = ImportKv(exported.adapter, exported_kv.keys, exported_kv.blocks)
    target.engine.import_kv(brought)
    lost = target.memory.tree.find(exported_kv.keys[1])
    assert lost is not None
    target.memory.tiers.drop_kv_from_host([lost])
    target.engine.import_kv(brought)
    target.memory.check_integrity()
    assert target.memory.host_counts().kv == len(exported_kv.keys)


def test_lost_block_is_written_in_place_of_later_ones() -> None:
    source = bench()
    begun(source)
    exported, exported_kv = export_with_kv(source)
    target = bench(host_blocks=2)
    tree, tiers = target.memory.tree, target.memory.tiers
    target.engine.import_kv(ImportKv(exported.adapter, exported_kv.keys[:2], exported_kv.blocks[:2]))
    lost = tree.find(exported_kv.keys[0])
    assert lost is not None
    tiers.drop_kv_from_host([lost])
    taken = tiers.host.lease(1)  # by something that does not give way
    target.engine.import_kv(ImportKv(exported.adapter, exported_kv.keys[:1], exported_kv.blocks[:1]))
    assert tree.find(exported_kv.keys[0]) == lost
    assert tree.on_host[lost]
    assert tree.find(exported_kv.keys[1]) is None
    tiers.host.release(taken)
    target.memory.check_integrity()


def test_a_recording_has_the_keys_and_not_the_bytes() -> None:
    class Kept:
        def __init__(self) -> None:
            self.messages: list[object] = []

        def note(self, record: Record) -> None:
            if isinstance(record, Received):
                self.messages.append(record.message)

        def close(self) -> None:
            pass

    source = bench()
    begun(source)
    source.engine._recorder = kept = Kept()
    exported, exported_kv = export_with_kv(source)
    source.engine.import_kv(ImportKv(None, exported_kv.keys, exported_kv.blocks))
    source.engine.abort(exported.request_id)
    assert kept.messages == [ExportRequest(R), ImportKv(None, exported_kv.keys, ()), Abort(R)]
