"""How much of each adapter's KV is used again."""

import numpy as np
import pytest

from lorikeet.memory.reuse import KvReuse


def shares(reuse: KvReuse, *tops: int) -> list[float]:
    return [float(each) for each in reuse.shares(np.array(tops))]


def keys(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def pass_time(reuse: KvReuse, now: float) -> None:
    """Let a request of another adapter arrive that reuses nothing."""
    reuse.requested(9, [b"other"], 0, 0, 0.0, now)


def test_single_shots_are_known_before_anything_was_evicted() -> None:
    reuse = KvReuse(100)
    assert shares(reuse, 1) == [pytest.approx(0.3)]
    reuse.computed(1, 2000, now=0.0)
    pass_time(reuse, 60.0)
    assert shares(reuse, 1)[0] < 0.05


def test_new_kv_of_a_popular_adapter_is_not_held_against_it() -> None:
    reuse = KvReuse(10_000)
    reuse.computed(1, 2000, now=0.0)
    reuse.evicted(1, keys(2000), now=1.0)
    pass_time(reuse, 2.0)
    assert shares(reuse, 1) == [pytest.approx(0.3)], "its next turns may still come"
    pass_time(reuse, 60.0)
    assert shares(reuse, 1)[0] < 0.05


def test_kv_that_comes_back_late_makes_the_judgement_wait() -> None:
    reuse = KvReuse(10_000)
    for turn in range(200):
        reuse.requested(1, keys(1), 1, 1, unused_s=50.0, now=float(turn))
    reuse.computed(2, 2000, now=200.0)
    pass_time(reuse, 250.0)
    assert shares(reuse, 2)[0] > 0.05
    pass_time(reuse, 330.0)
    assert shares(reuse, 2)[0] < 0.05


def test_found_and_evicted_kv_counts_when_it_is_used_again() -> None:
    reuse = KvReuse(100)
    reuse.computed(1, 1000, now=0.0)
    reuse.requested(1, keys(500, first=1000), 500, 500, 0.0, now=0.0)
    reuse.evicted(1, keys(100), now=0.0)
    pass_time(reuse, 60.0)
    assert shares(reuse, 1)[0] < 0.2, "nothing that was evicted was used again"
    reuse.requested(1, keys(100), 0, 0, 0.0, now=60.0)
    assert shares(reuse, 1)[0] > 0.3
    reuse.forget(1)
    assert shares(reuse, 1)[0] > 0.3, "the share of all adapters is assumed"


def test_kv_that_is_prefetched_and_evicted_again_unused_counts_once() -> None:
    reuse = KvReuse(1000)
    for _ in range(50):
        reuse.evicted(1, keys(20), now=0.0)
    reuse.requested(1, keys(20), 20, 20, 0.0, now=60.0)  # on the device again, by a prefetch
    assert shares(reuse, 1)[0] > 0.3


def test_conversations_that_end_before_their_eviction_are_reused_on_the_device_only() -> None:
    reuse = KvReuse(10_000)
    reuse.computed(1, 2000, now=0.0)
    reuse.requested(1, keys(1500, first=5000), 1500, 1500, 5.0, now=5.0)
    reuse.evicted(1, keys(2000), now=10.0)
    pass_time(reuse, 60.0)
    top = np.array([1])
    assert reuse.shares_on_device(top)[0] > 0.5
    assert reuse.shares(top)[0] < 0.05
    assert not reuse.are_copied(top)[0]
    assert not reuse.is_copied(int(top[0]))


def test_lost_kv_counts_when_it_is_requested_again() -> None:
    reuse = KvReuse(10_000)
    assert reuse.lost_share() == 0.0
    pass_time(reuse, 0.0)
    reuse.evicted(1, keys(1000), now=0.0)
    reuse.lost(1, 1000)
    pass_time(reuse, 60.0)
    assert reuse.lost_share() == 0.0
    reuse.requested(1, keys(400), 0, 100, 0.0, now=61.0)
    assert reuse.lost_share() == pytest.approx(300 / 1064), "100 of them were found on the host"
