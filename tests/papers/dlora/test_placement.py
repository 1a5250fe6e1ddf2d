"""dLoRA's proactive placement: the worked examples of its spec by name, and what must hold of every placement."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.papers.dlora.placement import RESERVED_SHARE, BurstTolerance, PreloadPlan, preload

MB = 10**6


def preloads(copies: Sequence[Sequence[int]], free_bytes: Sequence[int]) -> PreloadPlan:
    main = np.array(copies, np.bool_)
    return PreloadPlan(main, np.zeros_like(main), np.array(free_bytes, np.int64))


def demands_of(*tokens_per_s: float, size_bytes: int = 100 * MB) -> list[AdapterDemand]:
    """Adapters a0, a1 and so on."""
    return [AdapterDemand(AdapterDigest(f"a{k}"), 8, size_bytes, load) for k, load in enumerate(tokens_per_s)]


def replica_ids(count: int) -> list[ReplicaId]:
    return [ReplicaId(f"r{number}") for number in range(count)]


# --- Worked examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "kv_heads", "expected"),
    [(40, 40, 819_200), (80, 64, 2_621_440), (80, 8, 327_680)],
    ids=["13b", "70b-as-printed", "70b-grouped"],
)
def test_ex_6c_request_memory_follows_from_the_model(layers: int, kv_heads: int, expected: int) -> None:
    model = ModelGeometry(layers, kv_heads, head_dim=128, modules={}, dtype_bytes=2)
    assert model.kv_elements_per_token() * model.dtype_bytes == expected


def test_ex_7a_the_adapter_with_the_lowest_tolerance_gets_the_next_copy() -> None:
    placed = preload([100 * MB] * 2, [40, 10], [1000 * MB] * 2, 10 * MB)
    assert placed.main.tolist() == [[True, True], [False, True]]
    assert placed.free_bytes.tolist() == [900 * MB, 800 * MB]
    assert placed.tolerances([40, 10], 10 * MB).tolist() == [4.25, 8.0]

    after_two = preloads([[1, 0], [0, 1]], [900 * MB, 900 * MB])
    assert after_two.tolerances([40, 10], 10 * MB).tolist() == [2.25, 9.0]
    rejected = preloads([[1, 1], [1, 1]], [800 * MB, 800 * MB])
    assert rejected.tolerances([40, 10], 10 * MB)[0] == 4.0, "a second copy of B would lower A's"


def test_a_copy_that_lowers_the_lowest_tolerance_is_undone() -> None:
    # A second copy of a0 has to go beside a1, and takes from it what makes a1 the lowest, lower than a0 was.
    placed = preload([400 * MB] * 2, [10, 9], [1000 * MB, 1000 * MB], 10 * MB)
    assert placed.main.tolist() == [[True, False], [False, True]]
    assert placed.tolerances([10, 9], 10 * MB).tolist() == pytest.approx([6.0, 60 / 9])
    undone = preloads([[1, 1], [0, 1]], [600 * MB, 200 * MB])
    assert undone.tolerances([10, 9], 10 * MB).min() < 6.0


# --- Choices that the paper leaves open --------------------------------------------------------------


def test_each_adapter_gets_one_copy_before_any_gets_two() -> None:
    placed = preload([100 * MB] * 6, [50, 1, 1, 1, 1, 1], [1000 * MB] * 3, 10 * MB)
    assert placed.main.any(axis=1).all()


def test_of_equals_the_busiest_comes_first_and_the_first_replica_takes_it() -> None:
    placed = preload([100 * MB] * 2, [1, 2], [150 * MB], 10 * MB)
    assert placed.main.tolist() == [[False], [True]]
    assert preload([100 * MB], [1], [150 * MB] * 2, 45 * MB).main[0, 0]


def test_an_adapter_needs_room_for_a_request_beside_it() -> None:
    assert preload([100 * MB], [1], [110 * MB], 10 * MB).main.all()
    assert not preload([100 * MB], [1], [109 * MB], 10 * MB).main.any()


def test_an_adapter_without_load_gets_no_copy() -> None:
    placed = preload([100 * MB] * 2, [0, 5], [1000 * MB] * 2, 10 * MB, reserved_bytes=300 * MB)
    assert not placed.copies[0].any()
    assert placed.tolerances([0, 5], 10 * MB)[0] == np.inf


def test_reserved_memory_takes_further_copies_and_nothing_from_kv() -> None:
    without = preload([100 * MB] * 2, [40, 10], [1000 * MB] * 2, 10 * MB)
    placed = preload([100 * MB] * 2, [40, 10], [1100 * MB] * 2, 10 * MB, reserved_bytes=100 * MB)
    assert placed.main.tolist() == without.main.tolist()
    assert placed.free_bytes.tolist() == without.free_bytes.tolist()
    assert placed.reserved.tolist() == [[False, False], [True, False]], "A is everywhere, so B is next"
    assert placed.tolerances([40, 10], 10 * MB).tolist() == [4.25, 17.0]


# --- As a placement ----------------------------------------------------------------------------------


def test_shares_are_even_among_holders() -> None:
    table = BurstTolerance(1000 * MB, 10 * MB, reserved_share=0.0).place(demands_of(40, 10), replica_ids(2), 0.0)
    assert table.shares == {"a0": (("r0", 0.5), ("r1", 0.5)), "a1": (("r1", 1.0),)}


def test_adapter_without_a_copy_gets_the_least_loaded_home() -> None:
    placement = BurstTolerance(250 * MB, 10 * MB, reserved_share=0.0)
    table = placement.place(demands_of(9, 8, 7, 6, 3, 2, 0), replica_ids(2), 0.0)  # 9 and 7 on r0, 8 and 6 on r1
    homes = [table.shares[AdapterDigest(f"a{k}")] for k in (4, 5, 6)]
    assert homes == [(("r1", 1.0),), (("r0", 1.0),), (("r1", 1.0),)]


def test_the_table_is_the_same_while_nothing_changes() -> None:
    placement = BurstTolerance(1000 * MB, 10 * MB, RESERVED_SHARE)
    first = placement.place(demands_of(40, 10), replica_ids(2), 0.0)
    assert placement.place(demands_of(80, 20), replica_ids(2), 1.0) is first, "only ratios count"
    later = placement.place(demands_of(40, 10, 5), replica_ids(2), 2.0)
    assert later.epoch == first.epoch + 1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 50)), min_size=1, max_size=12),
    st.lists(st.integers(100, 1500), min_size=1, max_size=5),
    st.integers(0, 100),
)
def test_memory_is_respected_and_stopping_loses_nothing(
    adapters: list[tuple[int, int]], memory: list[int], reserved: int
) -> None:
    sizes, loads = [size for size, _ in adapters], [float(load) for _, load in adapters]
    placed = preload(sizes, loads, memory, 10.0, reserved)
    held = np.array(sizes) @ placed.main
    assert (placed.free_bytes == np.array(memory) - reserved - held).all()
    assert (placed.free_bytes[held > 0] >= 10).all(), "a request fits beside"
    assert (np.array(sizes) @ placed.reserved <= reserved).all()
    assert not (placed.main & placed.reserved).any(), "twice the same adapter on one replica"
    lacks = ~placed.copies & (np.array(loads) > 0)[:, None]
    left = reserved - np.array(sizes) @ placed.reserved
    assert not (lacks & (np.array(sizes)[:, None] <= left)).any(), "there was reserved memory for one more"

    main = placed._replace(reserved=np.zeros_like(placed.main))
    tolerances = main.tolerances(loads, 10.0)
    if np.isfinite(tolerances).any():
        # The greedy's own next copy lowers the lowest, or there is no room for it.
        lowest = max(np.flatnonzero(tolerances == tolerances.min()), key=lambda k: loads[k])
        fits = ~main.main[lowest] & (main.free_bytes >= sizes[lowest] + 10)
        if fits.any():
            j = int(np.where(fits, main.free_bytes, -1).argmax())
            more, free = main.main.copy(), main.free_bytes.copy()
            more[lowest, j] = True
            free[j] -= sizes[lowest]
            assert preloads(more.tolist(), free.tolist()).tolerances(loads, 10.0).min() < tolerances.min()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.integers(1, 15))
def test_every_adapter_has_a_home(loads: list[int], count: int, memory: int) -> None:
    placement = BurstTolerance(memory * 100 * MB, 10 * MB, RESERVED_SHARE)
    demands = demands_of(*loads)
    table = placement.place(demands, replica_ids(count), 0.0)
    assert set(table.shares) == {demand.adapter for demand in demands}
    assert all(sum(share.share for share in shares) == pytest.approx(1.0) for shares in table.shares.values())
