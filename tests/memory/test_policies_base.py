"""Whether KV on the host is loaded or computed again."""

import pytest

from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.tree import DependencyTree


def view(*, load_s: float, prefill_s: float, queued: int = 0, delayed_s: float = 0.0) -> MemoryView:
    """A device of 100 blocks; the seconds are those of one block."""
    made = MemoryView(DependencyTree(), device_blocks=100, queued=queued)
    made.load_kv_s = lambda blocks: load_s * blocks
    made.prefill_s = lambda blocks: prefill_s * blocks
    made.delay_per_lost_second = lambda excluded: max(0.0, delayed_s - excluded)
    return made


@pytest.mark.parametrize(("load_s", "pays"), [(0.9, True), (1.1, False)])
def test_alone_the_faster_is_chosen(load_s: float, pays: bool) -> None:
    assert view(load_s=load_s, prefill_s=1.0).loading_kv_pays(10, 20) is pays


def test_a_longer_step_counts_for_everyone_whom_it_delays() -> None:
    assert not view(load_s=3.0, prefill_s=1.0).loading_kv_pays(10, 20)
    assert view(load_s=3.0, prefill_s=1.0, delayed_s=2.5).loading_kv_pays(10, 20)


def test_the_request_itself_is_none_of_those_whom_it_delays() -> None:
    assert not view(load_s=3.0, prefill_s=1.0, delayed_s=2.5).loading_kv_pays(10, 20, is_waiting=True)


def test_queued_requests_wait_for_the_blocks_that_a_load_keeps() -> None:
    busy = view(load_s=3.0, prefill_s=1.0, queued=4, delayed_s=4.0)
    assert busy.loading_kv_pays(10, 10), "1.4 times 3 s beside 5 s"
    assert not busy.loading_kv_pays(10, 50), "3 times 3 s beside 5 s"


def test_the_request_itself_does_not_wait_for_its_blocks() -> None:
    assert not view(load_s=0.9, prefill_s=1.0, queued=1).loading_kv_pays(10, 20)
    assert view(load_s=0.9, prefill_s=1.0, queued=1).loading_kv_pays(10, 20, is_waiting=True)


def test_without_known_step_times_kv_is_loaded() -> None:
    assert view(load_s=9.0, prefill_s=0.0).loading_kv_pays(10, 20)


def test_copies_in_flight_now_do_not_delay_a_later_load() -> None:
    busy = view(load_s=9.0, prefill_s=1.0)
    busy.load_kv_alone_s = lambda blocks: 0.1 * blocks
    busy.store_kv_s = lambda blocks: 0.2 * blocks
    assert busy.waiting_for_a_copy_pays(10, 0.5)
    assert not busy.waiting_for_a_copy_pays(10, 0.2), "0.2 s beside 0.2 times 0.9 s"


def test_copies_of_kv_on_the_device_stay_until_lost_kv_is_requested_again() -> None:
    made = view(load_s=1.0, prefill_s=5.0)
    made.load_kv_alone_s = lambda blocks: 1.0 * blocks
    made.store_kv_alone_s = lambda blocks: 1.0 * blocks
    assert not made.losing_copies_pays(0.0)
    assert not made.losing_copies_pays(0.2)
    assert made.losing_copies_pays(0.3), "1 s beside 0.3 times 4 s"
    made.delay_per_lost_second = lambda excluded: 1.0
    assert made.losing_copies_pays(0.2), "the longer step delays another request"
