"""The guard: when a part is switched off, when on again, and what that costs at most."""

import random

import pytest

from lorikeet.core.guard import Guard, GuardedPart, Guards

PHASE_S = 300.0


def feed(guard: Guard, on_s: float, off_s: float, *, begin_s: float, seconds: float, per_s: int = 10) -> float:
    """Feed equal events, and return the seconds that pass before a switch; ``inf`` for none."""
    for event in range(int(seconds * per_s)):
        now = begin_s + event / per_s
        if guard.note(on_s, off_s, now) is not None:
            return now - begin_s
    return float("inf")


def test_a_part_without_data_acts() -> None:
    guard = Guard(GuardedPart.ORDER)
    assert guard.is_on
    assert guard.note(5.0, 0.0, 1.0) is None, "one loss proves nothing"


def test_a_part_that_loses_is_switched_off_and_on_again_when_it_wins() -> None:
    guard = Guard(GuardedPart.ORDER)
    assert feed(guard, 0.2, 0.1, begin_s=0.0, seconds=60.0) < 20.0
    assert not guard.is_on
    assert feed(guard, 0.1, 0.2, begin_s=60.0, seconds=60.0) < 10.0
    assert guard.is_on
    assert guard.switches == 2


def test_merits_of_the_past_excuse_no_loss() -> None:
    guard = Guard(GuardedPart.ORDER)
    feed(guard, 0.1, 0.2, begin_s=0.0, seconds=600.0)
    assert feed(guard, 0.2, 0.1, begin_s=600.0, seconds=60.0) < 20.0


def test_a_regret_that_no_request_notices_switches_nothing() -> None:
    guard = Guard(GuardedPart.ORDER)
    for second in range(600):
        guard.waited(10.0, float(second))
        assert guard.note(0.02, 0.01, float(second)) is None, "0.1 % of the waiting"


def test_noise_hardly_switches() -> None:
    guard = Guard(GuardedPart.ORDER)
    chance = random.Random(1)
    for event in range(36_000):
        guard.note(chance.expovariate(1.0), chance.expovariate(1.0), event / 10)
    assert guard.switches < 20, "in an hour"


def test_each_time_off_makes_the_next_one_harder() -> None:
    guard = Guard(GuardedPart.ORDER)
    first_s = feed(guard, 0.2, 0.1, begin_s=0.0, seconds=60.0)
    feed(guard, 0.1, 0.2, begin_s=first_s, seconds=60.0)
    assert feed(guard, 0.2, 0.1, begin_s=2 * first_s, seconds=120.0) > 1.3 * first_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("times", [1.3, 2.0, 4.0])
def test_adversarial_phases_cost_at_most_five_percent(times: float, seed: int) -> None:
    """The sign changes every five minutes; costs are exponential, and requests wait as long as the part lets them."""
    guard = Guard(GuardedPart.COPIES)
    chance = random.Random(seed)
    cost_s = best_s = now = 0.0
    for phase in range(8):
        on_s = off_s = 0.0
        while now < (phase + 1) * PHASE_S:
            now += chance.expovariate(20.0)
            event_s = chance.expovariate(20.0)
            won_s, lost_s = event_s, times * event_s
            part_s, other_s = (won_s, lost_s) if phase % 2 == 0 else (lost_s, won_s)
            on_s += part_s
            off_s += other_s
            cost_s += part_s if guard.is_on else other_s
            guard.waited(part_s if guard.is_on else other_s, now)
            guard.note(part_s, other_s, now)
        best_s += min(on_s, off_s)
    assert cost_s <= 1.05 * best_s
    assert guard.switches >= 7


def test_parts_act_where_nothing_is_guarded() -> None:
    guards = Guards()
    guards.add(GuardedPart.ORDER)
    assert guards.is_on(GuardedPart.ORDER)
    assert guards.stats() == {}


def test_switches_are_reported_to_the_next_request_and_to_the_log() -> None:
    guards = Guards(enabled=True)
    guards.add(GuardedPart.ORDER)
    for event in range(200):
        guards.note(GuardedPart.ORDER, 0.2, 0.1, event / 10)
    (switch,) = guards.take_switches()
    assert not switch.is_on
    assert str(switch).startswith("order is switched off: with it requests waited")
    assert guards.take_logged() == [switch]
    assert guards.take_switches() == guards.take_logged() == []
    assert not guards.stats()["order"].is_on


def test_the_first_seconds_after_a_switch_do_not_count() -> None:
    guard = Guard(GuardedPart.COPIES)
    off_s = feed(guard, 0.2, 0.1, begin_s=0.0, seconds=60.0)
    assert not guard.is_on
    assert feed(guard, 0.0, 5.0, begin_s=off_s, seconds=2.9) == float("inf"), "the state is still the other choice's"
    assert guard.regret_s == 0.0
    assert feed(guard, 0.0, 5.0, begin_s=off_s + 3.0, seconds=10.0) < 5.0
