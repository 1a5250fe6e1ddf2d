"""How often KV is asked for again."""

import numpy as np
import pytest

from lorikeet.memory.reuse import KvReuse


def shares(reuse: KvReuse, *tops: int) -> list[float]:
    return [float(each) for each in reuse.shares(np.array(tops))]


def test_single_shots_are_known_before_anything_was_evicted() -> None:
    reuse = KvReuse(100)
    assert shares(reuse, 1) == [pytest.approx(0.3)]
    reuse.computed(1, 2000)
    assert shares(reuse, 1)[0] < 0.05


def test_kv_that_is_found_or_asked_for_after_it_has_left_counts() -> None:
    reuse = KvReuse(100)
    reuse.computed(1, 1000)
    reuse.asked(1, 500, ())
    assert shares(reuse, 1)[0] == pytest.approx(0.3), "none has left yet"
    for number in range(100):
        reuse.left(1, b"%d" % number)
    assert shares(reuse, 1)[0] < 0.05, "what has left was not asked for"
    reuse.asked(1, 0, [b"%d" % number for number in range(100)])
    assert shares(reuse, 1)[0] > 0.3
    reuse.forget(1)
    assert shares(reuse, 1)[0] > 0.3, "others' share is assumed"
