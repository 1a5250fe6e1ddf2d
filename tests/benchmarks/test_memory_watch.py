from benchmarks.memory_watch import InfiniteCache
from lorikeet.core.geometry import ModelGeometry, ModuleShape
from lorikeet.workloads.synthetic import synthetic_adapters

SHAPE = ModuleShape(4, 4)
GEOMETRY = ModelGeometry(1, 1, 4, dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), SHAPE), 2)
ONE, OTHER = synthetic_adapters(2, (8,), GEOMETRY)


def test_whole_blocks_of_earlier_texts_are_found_and_never_the_last_token() -> None:
    cache = InfiniteCache(4)
    assert cache.reusable_tokens(ONE, list(range(10))) == 0
    cache.add(ONE, list(range(10)))
    assert cache.reusable_tokens(ONE, list(range(10))) == 8
    assert cache.reusable_tokens(ONE, list(range(8))) == 4
    assert cache.reusable_tokens(ONE, [0, 1, 2, 3, 9, 5, 6, 7, 8]) == 4


def test_an_answer_can_be_found_too() -> None:
    cache = InfiniteCache(4)
    cache.add(None, [0, 1, 2, 3, 4])
    cache.add(None, [0, 1, 2, 3, 4, 5, 6, 7])
    assert cache.reusable_tokens(None, list(range(9))) == 8


def test_nothing_is_found_under_another_adapter() -> None:
    cache = InfiniteCache(4)
    cache.add(ONE, list(range(9)))
    assert cache.reusable_tokens(OTHER, list(range(9))) == cache.reusable_tokens(None, list(range(9))) == 0
    cache.add(OTHER, list(range(9)))
    assert cache.kv_blocks == 4
    assert list(cache.adapters) == [ONE.digest, OTHER.digest]
