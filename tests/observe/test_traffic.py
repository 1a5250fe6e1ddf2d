"""Counts per adapter: a bounded number of labels whose sum is always exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.observe.traffic import OTHER, AdapterUsage, RequestCounts, nanoseconds


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def usage(labels: int) -> tuple[AdapterUsage, Clock]:
    clock = Clock()
    return AdapterUsage(labels, clock), clock


def requests(counts: dict[str, RequestCounts]) -> dict[str, int]:
    return {name: count.requests for name, count in counts.items()}


def test_while_labels_are_free_every_adapter_is_counted_from_its_first_request() -> None:
    adapters, _ = usage(2)
    for name in "aab":
        adapters.of(name).add(RequestCounts(requests=1))
    assert requests(adapters.labelled()) == {"a": 2, "b": 1, OTHER: 0}


def test_the_busiest_adapters_are_labelled_and_the_rest_share_other() -> None:
    adapters, _ = usage(2)
    for name in "abcccccdddd":
        adapters.of(name).add(RequestCounts(requests=1))
    # A label that changes hands counts from then on; what it counted before moves to other.
    assert requests(adapters.labelled()) == {"c": 0, "d": 0, OTHER: 11}
    adapters.of("c").add(RequestCounts(requests=1))
    adapters.of("a").add(RequestCounts(requests=1))
    assert requests(adapters.labelled()) == {"c": 1, "d": 0, OTHER: 12}


def test_an_adapter_keeps_its_label_until_another_is_clearly_busier() -> None:
    adapters, clock = usage(1)
    for name, count in (("a", 10), ("b", 12)):
        for _ in range(count):
            adapters.of(name).add(RequestCounts(requests=1))
        assert "a" in adapters.labelled()
    clock.now_s = 3600.0
    adapters.of("b").add(RequestCounts(requests=1))
    assert "b" in adapters.labelled()


def test_the_base_model_has_counts_of_its_own() -> None:
    adapters, _ = usage(2)
    adapters.of(None).add(RequestCounts(requests=1))
    assert adapters.of(None).total.requests == 1
    assert requests(adapters.labelled()) == {OTHER: 0}


def test_a_forgotten_adapter_stays_in_the_sum() -> None:
    adapters, _ = usage(2)
    adapters.of("a").add(RequestCounts(requests=1))
    adapters.labelled()
    adapters.of("a").add(RequestCounts(requests=1))
    adapters.forget("a")
    assert requests(adapters.labelled()) == {OTHER: 2}


def test_an_adapter_called_other_is_counted_under_other() -> None:
    adapters, _ = usage(2)
    for name in (OTHER, "a", OTHER, "b"):
        adapters.of(name).add(RequestCounts(requests=1))
    assert requests(adapters.labelled()) == {"a": 1, "b": 1, OTHER: 2}
    adapters.forget(OTHER)
    adapters.of("c").add(RequestCounts(requests=1))
    assert requests(adapters.labelled()) == {"a": 1, "b": 1, OTHER: 3}


def test_looking_at_an_adapter_without_traffic_takes_no_label() -> None:
    adapters, _ = usage(1)
    assert adapters.peek("a").total == RequestCounts()
    adapters.of("b").add(RequestCounts(requests=1))
    assert requests(adapters.labelled()) == {"b": 1, OTHER: 0}
    assert adapters.peek("b").total.requests == 1


def test_sums_of_times_in_other_never_fall_by_a_rounding() -> None:
    adapters, _ = usage(1)
    for name, seconds in (("a", 0.1), ("b", 0.7)):
        adapters.of(name).add(RequestCounts(requests=1, e2e_ns=nanoseconds(seconds)))
    shown = [adapters.labelled()[OTHER].e2e_s]
    for turn in range(1000):
        adapters.of("a").add(RequestCounts(requests=1, e2e_ns=nanoseconds(0.1 + turn / 7)))
        shown.append(adapters.labelled()[OTHER].e2e_s)
    assert set(shown) == {0.7}


@pytest.mark.slow
@given(st.lists(st.one_of(st.sampled_from("abcdefgh"), st.integers(1, 900)), max_size=60))
def test_the_sum_is_exact_and_other_never_falls(script: list[str | int]) -> None:
    adapters, clock = usage(3)
    total = 0
    other = 0
    for entry in script:
        if isinstance(entry, int):
            clock.now_s += entry
        else:
            adapters.of(entry).add(RequestCounts(requests=1, prompt_tokens=7))
            total += 1
        counts = adapters.labelled()
        assert len(counts) <= 4
        assert sum(requests(counts).values()) == total
        assert sum(count.prompt_tokens for count in counts.values()) == 7 * total
        assert counts[OTHER].requests >= other
        other = counts[OTHER].requests


def test_of_too_many_names_the_one_used_longest_ago_is_counted_with_the_others() -> None:
    clock = Clock()
    tenants = AdapterUsage(2, clock, most=2)
    for name in "abac":
        clock.now_s += 1
        tenants.of(name).add(RequestCounts(requests=1))
    assert requests(tenants.labelled()) == {"a": 2, "c": 0, OTHER: 2}
    tenants.of("a").running = tenants.of("c").running = 1
    assert tenants.running(("c", OTHER)) == {"c": 1, OTHER: 1}
