"""Splits choose by shares, keep sticky keys, and move only the keys that they must."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.splits import Split, why_invalid

KEYS = [f"user-{number}" for number in range(20_000)]


def bounds(share: float, count: int) -> tuple[float, float]:
    """The two-sided 99 % bounds of a binomial, by its normal limit."""
    spread = 2.576 * math.sqrt(share * (1 - share) / count)
    return share - spread, share + spread


@pytest.mark.parametrize("shares", [{"v2": 0.95, "v3": 0.05}, {"v2": 1, "v3": 1, "v4": 2}, {"v2": 95, "v3": 5}])
def test_versions_get_their_shares(shares: dict[str, float]) -> None:
    split = Split(shares)
    chosen = [split.ranked("legal", key)[0] for key in KEYS]
    for version, share in shares.items():
        low, high = bounds(share / sum(shares.values()), len(KEYS))
        assert low < chosen.count(version) / len(KEYS) < high


def test_shadows_get_their_share_independently_of_the_version() -> None:
    split = Split({"v2": 1, "v3": 1}, {"v4": 0.2})
    copied = [key for key in KEYS if split.copied_to("legal", key)]
    low, high = bounds(0.2, len(KEYS))
    assert low < len(copied) / len(KEYS) < high
    low, high = bounds(0.5, len(copied))
    assert low < sum(split.ranked("legal", key)[0] == "v2" for key in copied) / len(copied) < high


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_changed_share_moves_keys_only_to_the_version_that_grew(before: float, after: float) -> None:
    old = Split({"v2": before, "v3": 1 - before})
    new = Split({"v2": after, "v3": 1 - after})
    grew = "v2" if after > before else "v3"
    for key in KEYS[:100]:
        first, second = old.ranked("legal", key)[0], new.ranked("legal", key)[0]
        assert first == second or second == grew


def test_a_removed_version_moves_only_its_own_keys() -> None:
    with_all = Split({"v2": 3, "v3": 1, "v4": 1})
    for key in KEYS[:1000]:
        first, *others = with_all.ranked("legal", key)
        left = Split({name: share for name, share in with_all.versions.items() if name != "v3"})
        assert left.ranked("legal", key)[0] == (others[0] if first == "v3" else first)


@pytest.mark.parametrize(
    ("versions", "shadow", "reason"),
    [
        ({}, {}, "at least one version"),
        ({"v2": 0.0}, {}, "at least one version"),
        ({"v2": -1.0, "v3": 1.0}, {}, "the share of 'v2'"),
        ({"v2": math.nan, "v3": 1.0}, {}, "the share of 'v2'"),
        ({"legal": 1.0}, {}, "itself"),
        ({"v2": 1.0}, {"v3": 1.5}, "from 0 to 1"),
        ({"v2": 1.0, "v3": 0.0}, {"v4": 1.0}, ""),
    ],
)
def test_shares_that_are_not_valid_are_named(versions: dict[str, float], shadow: dict[str, float], reason: str) -> None:
    found = why_invalid("legal", versions, shadow)
    assert reason in found
    assert bool(found) == bool(reason)
