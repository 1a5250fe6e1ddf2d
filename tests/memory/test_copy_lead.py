"""How far ahead of its eviction KV is copied."""

from lorikeet.core.guard import HALF_LIFE_S
from lorikeet.memory.copy_lead import COPIED_PART, CopyLead
from lorikeet.presets import HostKv, Preset
from tests.memory.asks import ask, words
from tests.support.scripted import Bench


def test_a_fixed_part_counts_until_blocks_were_evicted_without_a_copy() -> None:
    lead = CopyLead(host_blocks=10_000)
    assert lead.soon(800, 0.0) == 800 // COPIED_PART
    assert lead.at_a_time(800, 0.0) == 100
    lead.late(150, 0.0)
    assert lead.soon(800, 0.0) == 250
    assert lead.soon(800, HALF_LIFE_S) == 175, "half of them are forgotten"


def test_the_lead_is_never_more_than_what_is_cached_and_half_of_it_stays_evictable() -> None:
    lead = CopyLead(host_blocks=10_000)
    for _ in range(100):
        lead.late(500, 0.0)
    assert lead.soon(300, 0.0) == 300
    assert lead.at_a_time(300, 0.0) == 150
    assert lead.soon(800, 0.0) == 100 + 300, "a lead that was of no use is not remembered"


def test_blocks_that_left_before_their_copy_make_the_next_copies_earlier() -> None:
    bench = Bench(blocks=24, host_blocks=200, preset=Preset(host_kv=HostKv.AHEAD, swap_interval_s=1e3))
    for index in range(4):  # no tick copies anything
        ask(bench, f"kv{index}", words(1000 * index, 12))
    cached = bench.memory.counts().cached
    now = bench.clock.now()
    assert bench.memory.evictor.lead.soon(cached, now) > cached // COPIED_PART


def test_copies_of_kv_that_stays_take_a_part_of_a_small_host_tier_only() -> None:
    lead = CopyLead(host_blocks=1600)
    lead.late(500, 0.0)
    assert lead.soon(800, 0.0) == 1600 // COPIED_PART
    assert lead.soon(2400, 0.0) == 2400 // COPIED_PART, "as without late copies"
