"""dLoRA's co-migration: the worked examples of its spec by name, and what must hold of every plan."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.cluster.migration import solver
from lorikeet.cluster.migration.problem import (
    CoMigrationSettings,
    MigrationInstance,
    MigrationPlan,
    MovableRequest,
    ReplicaLoad,
    ReviewOutcome,
    recompute_s,
)
from lorikeet.cluster.migration.review import CoMigration, selected
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import Bench

MB, GB = 10**6, 10**9
A, B = AdapterDigest("A"), AdapterDigest("B")
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
SIZES = {A: 100 * MB, B: 100 * MB}

# L = 10 s, gamma = 1.1 for whoever moves, eta = 0.5 s. The solver may take the time it needs on a busy machine.
PRINTED = CoMigrationSettings(affinity=0.05, gap=0.0, time_limit_s=30.0)


def requests(
    types: str, where: str = "", *, move_s: float = 1.0, memory_bytes: int = MB, **more: Any
) -> list[MovableRequest]:
    """Letters are adapters, - the base model; digits are replicas, all 0 if left out."""
    return [
        MovableRequest(
            RequestId(f"q{number}"),
            None if letter == "-" else AdapterDigest(letter),
            ReplicaId(f"r{replica}"),
            memory_bytes,
            execution_s=10.0,
            move_s=move_s,
            **more,
        )
        for number, (letter, replica) in enumerate(zip(types, where or "0" * len(types), strict=True), start=1)
    ]


def replicas(count: int = 2, device_bytes: int = 100 * GB, **more: Any) -> list[ReplicaLoad]:
    """All of them short of memory."""
    return [ReplicaLoad(ReplicaId(f"r{number}"), device_bytes, 0, 0.0, **more) for number in range(count)]


def problem_of(
    movable: Sequence[MovableRequest], settings: CoMigrationSettings = PRINTED, **more: Any
) -> MigrationInstance:
    return MigrationInstance.of(replicas(**more), movable, SIZES, settings)


def longest_s(problem: MigrationInstance, placement: Sequence[int]) -> float:
    return float(problem.running_s(np.array(placement)).max())


def reviewed(movable: Sequence[MovableRequest], settings: CoMigrationSettings = PRINTED, **more: Any) -> MigrationPlan:
    return CoMigration(settings).review(replicas(**more), movable, SIZES)


# --- Worked examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_ex_8a_one_type_moves_as_a_whole(full: bool) -> None:
    movable = requests("AABB")
    problem = problem_of(movable)
    assert problem.running_s(problem.home).tolist() == [41.0, 0.0]
    assert problem.running_s(np.array([0, 0, 1, 1])).tolist() == [20.5, 22.5]
    assert problem.running_s(np.array([0, 1, 0, 1])).tolist() == [21.0, 23.0]

    plan = reviewed(movable, PRINTED._replace(full=full), host_bytes=100 * GB)
    assert (plan.outcome, plan.before_s, plan.after_s) == (ReviewOutcome.PLANNED, 41.0, 22.5)
    assert len({move.adapter for move in plan.moves}) == 1
    assert len(plan.moves) == 2


def test_ex_8b_balanced_requests_stay() -> None:
    problem = problem_of(requests("AA", "01"))
    assert longest_s(problem, [0, 1]) == 10.5
    assert longest_s(problem, [1, 0]) == 11.5
    assert reviewed(requests("AA", "01")) == MigrationPlan(ReviewOutcome.NO_BETTER, before_s=10.5, after_s=10.5)


def test_ex_8b_the_printed_factor_cannot_tell_staying_from_swapping() -> None:
    literal = problem_of(requests("AA", "01", moved_s=1.0), PRINTED._replace(literal=True))
    assert longest_s(literal, [0, 1]) == longest_s(literal, [1, 0]) == 11.5


def test_ex_8c_vertex_rounds_to_the_best_whole_plan_and_even_split_does_not() -> None:
    movable = requests("AAA")
    problem = problem_of(movable)
    relaxed = solver.solve_relaxed(problem, PRINTED.gap, PRINTED.time_limit_s)
    assert relaxed is not None
    assert relaxed.running_s == pytest.approx(10 * 1.5714 + 0.5, abs=1e-3)
    assert sorted(relaxed.shares[:, 0]) == pytest.approx([0.0, 0.5714, 1.0], abs=1e-3)

    plan = reviewed(movable)
    assert (plan.before_s, plan.after_s) == (30.5, 20.5)
    assert len(plan.moves) == 1
    even = np.tile([0.5238, 0.4762], (3, 1))
    assert longest_s(problem, solver.rounded(even, problem.home).tolist()) == 30.5


def test_ex_8d_requests_beyond_the_memory_are_swapped() -> None:
    crowded = PRINTED._replace(swap_bytes_per_s=20 * GB)
    movable = requests("AABB", memory_bytes=300 * MB)
    problem = problem_of(movable, crowded, device_bytes=1000 * MB)
    assert problem.running_s(problem.home)[0] == pytest.approx(41.0 + 0.02)
    roomy = problem_of(movable, crowded, device_bytes=1400 * MB)
    assert roomy.running_s(roomy.home)[0] == 41.0


def test_move_delays_all_running_requests_at_the_target() -> None:
    """A prefill of one second pays where it holds up five, and not where it holds up twenty."""
    assert problem_of(requests("AAA"), running=5).cost_s.tolist() == [[10.0, 15.0]] * 3
    assert len(reviewed(requests("AAA"), running=5).moves) == 1
    assert reviewed(requests("AAA"), running=20).outcome is ReviewOutcome.NO_BETTER
    assert len(reviewed(requests("AAA", transfers_kv=True), running=20).moves) == 1, "KV is copied while they go on"


def test_ex_8e_moved_request_prefills_its_tokens_and_resumes_at_token_31() -> None:
    moved = Request(RequestId("q1"), list(range(100)), SamplingParams(max_tokens=32), 0.0, output_token_ids=[7] * 30)
    target = Bench(blocks=64, limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256))
    target.tokens[moved.request_id] = list(moved.output_token_ids)  # which the client has: the next is number 31
    target.engine.submit(moved)
    target.run()
    (first, *_) = [step for plan in target.plans for step in plan.sequences]
    assert (first.start, first.tokens) == (0, 130)
    assert len(target.tokens[moved.request_id]) == 32
    assert recompute_s(130, lambda tokens: tokens * 1e-3, link_bytes_per_s=520e6) == pytest.approx(0.13 + 1e-6)


# --- When, and who -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_bytes", "queue_delay_s", "is_short"),
    [(100 * MB, 5.0, False), (99 * MB, 0.0, True), (1000 * MB, 5.1, True)],
)
def test_nothing_is_solved_unless_a_replica_is_short(free_bytes: int, queue_delay_s: float, is_short: bool) -> None:
    here = ReplicaLoad(R0, 1000 * MB, free_bytes, queue_delay_s)
    plan = CoMigration(PRINTED).review([here, ReplicaLoad(R1, 1000 * MB, 1000 * MB, 0.0)], requests("AABB"), SIZES)
    assert plan.outcome == (ReviewOutcome.PLANNED if is_short else ReviewOutcome.CALM)


def test_the_busiest_and_the_least_busy_take_part() -> None:
    assert selected(np.array([5.0, 9.0, 1.0, 3.0, 7.0, 2.0]), 2) == [1, 2, 4, 5]
    assert selected(np.array([1.0, 1.0, 1.0]), 1) == [0, 2]
    assert selected(np.array([1.0, 2.0, 3.0]), 2) == [0, 1, 2]


def test_replicas_in_the_middle_are_left_alone() -> None:
    plan = reviewed(requests("AAAABB", "000011"), PRINTED._replace(selected=1), count=3)
    assert {(move.source, move.target) for move in plan.moves} == {(R0, ReplicaId("r2"))}


def test_no_movable_request_gives_no_plan() -> None:
    assert reviewed([]).outcome is ReviewOutcome.NO_BETTER


def test_a_gain_below_the_margin_is_not_worth_it() -> None:
    movable = requests("AABB")  # 41 becomes 22.5, which is 45 % less
    assert reviewed(movable, PRINTED._replace(margin=0.45)).outcome is ReviewOutcome.PLANNED
    assert reviewed(movable, PRINTED._replace(margin=0.46)).outcome is ReviewOutcome.NO_BETTER


def test_default_settings_solve_the_examples() -> None:
    plan = reviewed(requests("AABB"), CoMigrationSettings(time_limit_s=30.0))
    assert plan.outcome is ReviewOutcome.PLANNED
    assert plan.after_s < 0.95 * plan.before_s


# --- Costs -------------------------------------------------------------------------------------------


def test_moving_a_request_again_costs_more() -> None:
    fresh, moved = requests("AA")[0], requests("AA", moved_s=4.0)[1]
    plan = reviewed([fresh, moved])
    assert [move.request_id for move in plan.moves] == [fresh.request_id]
    assert problem_of([moved]).cost_s.tolist() == [[10.0, 15.0]]


@pytest.mark.parametrize(
    ("types", "where", "count", "least"), [("CCBAABAA", "00000011", 2, 2), ("ACBCAA", "100010", 3, 2)]
)
def test_plan_with_fewest_moves_wins_among_equals(types: str, where: str, count: int, least: int) -> None:
    sizes = {**SIZES, AdapterDigest("C"): MB}
    plan = CoMigration(PRINTED).review(replicas(count), requests(types, where, move_s=0.0), sizes)
    assert plan.outcome is ReviewOutcome.PLANNED
    assert len(plan.moves) == least, "6 moves have the same longest time"


def test_requests_of_the_base_model_need_no_adapter() -> None:
    plan = reviewed(requests("--"))
    assert (len(plan.moves), plan.before_s, plan.after_s) == (1, 20.0, 11.0)


def test_reserved_memory_is_not_counted_on() -> None:
    movable = requests("AAAA", memory_bytes=200 * MB)  # with their adapter 900 MB
    fits = problem_of(movable, device_bytes=1000 * MB, reserved_bytes=100 * MB)
    assert longest_s(fits, [0, 0, 0, 0]) == 40.5
    over = problem_of(movable, device_bytes=1000 * MB, reserved_bytes=200 * MB)
    assert longest_s(over, [0, 0, 0, 0]) == pytest.approx(40.5 + 100 * MB / 25e9)


@pytest.mark.parametrize(
    ("reserved_bytes", "outcome"), [(400 * MB, ReviewOutcome.PLANNED), (401 * MB, ReviewOutcome.UNSOLVED)]
)
def test_the_full_problem_keeps_reserved_memory_free(reserved_bytes: int, outcome: ReviewOutcome) -> None:
    movable = requests("AAAA", memory_bytes=250 * MB)
    full = PRINTED._replace(full=True)
    plan = reviewed(movable, full, device_bytes=1000 * MB, reserved_bytes=reserved_bytes)
    assert plan.outcome is outcome  # 2 and 2 with an adapter each: 600 MB; there is no host memory


def test_full_problem_swaps_to_hosts_only_as_much_as_fits() -> None:
    movable = requests("AAAA", memory_bytes=250 * MB)
    problem = problem_of(movable, device_bytes=350 * MB, host_bytes=250 * MB)
    whole = solver.solve_full(problem, 0.0, 30.0)
    assert whole is not None
    per_replica = Counter(whole.placement.tolist())
    assert per_replica == {0: 2, 1: 2}
    assert Counter(whole.placement[whole.on_host].tolist()) == {0: 1, 1: 1}
    assert problem.running_with_swaps_s(*whole).tolist() == pytest.approx([20.51, 22.51])
    assert solver.solve_full(problem_of(movable, device_bytes=350 * MB, host_bytes=249 * MB), 0.0, 30.0) is None


def test_an_adapter_of_unknown_size_is_an_error() -> None:
    with pytest.raises(KeyError):
        reviewed(requests("C"))


# --- The solver's word -------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_no_time_keeps_the_placement(full: bool) -> None:
    plan = reviewed(requests("AABB"), PRINTED._replace(full=full, time_limit_s=0.0), host_bytes=GB)
    assert plan == MigrationPlan(ReviewOutcome.UNSOLVED, before_s=41.0, after_s=41.0)


@pytest.mark.parametrize("unproven_run", [0, 1])
def test_a_solution_that_is_not_proven_keeps_the_placement(unproven_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def solve(model: Any, solver: Any) -> bool:
        runs.append(model.name)
        return proven(model, solver) and len(runs) - 1 != unproven_run

    proven = solver.solve
    monkeypatch.setattr(solver, "solve", solve)
    assert reviewed(requests("AABB")).outcome is ReviewOutcome.UNSOLVED
    assert len(runs) == unproven_run + 1


def test_pulps_own_status_does_not_tell_a_time_out_from_an_optimum() -> None:
    class OutOfTime(pulp.LpSolver):  # type: ignore[misc]
        """What PuLP makes of HiGHS's time limit when HiGHS has some solution."""

        def actualSolve(self, lp: Any) -> int:
            lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
            return int(pulp.LpStatusOptimal)

    model = pulp.LpProblem("late", pulp.LpMinimize)
    model += model.add_variable("x", 0)
    assert not solver.solve(model, OutOfTime())
    assert model.status == pulp.LpStatusOptimal


# --- Properties --------------------------------------------------------------------------------------

TYPES = [AdapterDigest(letter) for letter in "ABCDE"]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[ReplicaLoad], list[MovableRequest], dict[AdapterDigest, int]]:
    """Up to 5 replicas, 10 requests, 5 adapters, in memory that is sometimes too small."""
    count = draw(st.integers(1, 5))
    loads = [
        ReplicaLoad(
            ReplicaId(f"r{number}"),
            draw(st.integers(1, 40)) * 100 * MB,
            0,
            0.0,
            reserved_bytes=50 * MB,
            host_bytes=draw(st.sampled_from((0, 100 * GB))),
        )
        for number in range(count)
    ]
    movable = [
        MovableRequest(
            RequestId(f"q{number}"),
            draw(st.sampled_from([None, *TYPES])),
            ReplicaId(f"r{draw(st.integers(0, count - 1))}"),
            draw(st.integers(0, 2000)) * MB,
            draw(st.floats(0.0, 20.0)),
            draw(st.floats(0.0, 5.0)),
            draw(st.floats(0.0, 5.0)),
            draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 10)))
    ]
    return loads, movable, {each: draw(st.integers(0, 300)) * MB for each in TYPES}


def carried_out(movable: Sequence[MovableRequest], plan: MigrationPlan) -> list[MovableRequest]:
    """Where requests are after a plan."""
    targets = {move.request_id: move.target for move in plan.moves}
    return [request._replace(replica=targets.get(request.request_id, request.replica)) for request in movable]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(clusters(), st.booleans(), st.sampled_from((1, 2)), st.sampled_from((0.0, 0.05)), st.sampled_from((0.0, 0.1)))
def test_a_plan_is_sound_and_never_raises_its_own_objective(
    cluster: tuple[list[ReplicaLoad], list[MovableRequest], dict[AdapterDigest, int]],
    full: bool,
    count: int,
    margin: float,
    gap: float,
) -> None:
    loads, movable, sizes = cluster
    chosen = CoMigrationSettings(full=full, selected=count, margin=margin, gap=gap, time_limit_s=30.0)
    plan = CoMigration(chosen).review(loads, movable, sizes)
    assert plan.after_s <= plan.before_s
    assert (plan.after_s < plan.before_s) == (plan.outcome is ReviewOutcome.PLANNED)
    assert (plan.outcome is ReviewOutcome.PLANNED) == bool(plan.moves)
    assert full or plan.outcome is not ReviewOutcome.UNSOLVED

    homes = {request.request_id: request.replica for request in movable}
    assert len({move.request_id for move in plan.moves}) == len(plan.moves), "one replica for each request"
    assert all(homes[move.request_id] == move.source != move.target for move in plan.moves)
    assert {move.target for move in plan.moves} <= {load.replica for load in loads}

    if plan.moves and not full:
        # Counted anew over all replicas: those left out were less busy than the busiest.
        everywhere = MigrationInstance.of(loads, movable, sizes, chosen)
        index = {load.replica: j for j, load in enumerate(loads)}
        placement = np.array([index[request.replica] for request in carried_out(movable, plan)])
        assert everywhere.running_s(everywhere.home).max() == pytest.approx(plan.before_s)
        assert plan.after_s - 1e-9 <= everywhere.running_s(placement).max() < plan.before_s + 1e-9


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(clusters())
def test_the_relaxed_solution_is_a_vertex_and_no_plan_is_better(
    cluster: tuple[list[ReplicaLoad], list[MovableRequest], dict[AdapterDigest, int]],
) -> None:
    loads, movable, sizes = cluster
    problem = MigrationInstance.of(loads, movable, sizes, PRINTED)
    if not movable:
        return
    relaxed = solver.solve_relaxed(problem, 0.0, 30.0)
    assert relaxed is not None
    assert relaxed.shares.sum(axis=1) == pytest.approx(1.0)
    split = ((relaxed.shares > 1e-5) & (relaxed.shares < 1 - 1e-5)).any(axis=1)
    assert split.sum() < 2 * len(loads), "a vertex splits fewer requests than there are constraints on replicas"
    # Moves cost a little beside the objective, so the solution may be so much longer than the shortest.
    slack_s = solver.MOVE_WEIGHT * problem.mean_s * len(movable) + 1e-4
    assert relaxed.running_s <= longest_s(problem, problem.home.tolist()) + slack_s
    placement = solver.rounded(relaxed.shares, problem.home)
    assert relaxed.running_s <= longest_s(problem, placement.tolist()) + slack_s


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from("01")), min_size=1, max_size=6), st.integers(0, 3))
def test_the_full_problem_is_solved_to_the_best_of_all_placements(drawn: list[tuple[str, str]], move_s: int) -> None:
    movable = requests("".join(a for a, _ in drawn), "".join(r for _, r in drawn), move_s=float(move_s))
    problem = problem_of(movable, host_bytes=GB)
    whole = solver.solve_full(problem, 0.0, 30.0)
    assert whole is not None
    count = len(movable)
    best_s = min(longest_s(problem, [plan >> i & 1 for i in range(count)]) for plan in range(2**count))
    assert longest_s(problem, whole.placement.tolist()) == pytest.approx(best_s, abs=0.1)
