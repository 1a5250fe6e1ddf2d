"""Solves both forms of the co-migration problem with PuLP and its solver HiGHS.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024, section
5.2. For our additions see docs/decisions/comigration.md.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pulp

from lorikeet.cluster.migration.problem import NO_ADAPTER, Flags, Floats, Ints, MigrationInstance

MOVE_WEIGHT = 1e-3
"""Cost of a move in the objective, as a share of the mean execution time. A move that gains less is not made."""

SAME_SHARE = 1e-6
"""Difference below which shares are equal: the solver's own tolerance."""

_Sum = Any  # a variable or a linear expression of PuLP, which publishes no types
_Grid = list[list[_Sum]]


class RelaxedSolution(NamedTuple):
    """Holds a solution of the relaxed problem.

    Attributes:
        shares: ``[n, m]``, share of each request at each replica; rows sum to 1.
        running_s: running time of the busiest replica if requests could be split by these shares.
    """

    shares: Floats
    running_s: float


class FullSolution(NamedTuple):
    """Holds a solution of the full problem.

    Attributes:
        placement: ``[n]``, replica of each request.
        on_host: ``[n]``, whether the KV of each request is swapped out.
    """

    placement: Ints
    on_host: Flags


def solve(model: pulp.LpProblem, solver: pulp.HiGHS) -> bool:
    """Solve a problem. Return whether the solution is proven optimal within the solver's gap.

    PuLP's status is "optimal" even if HiGHS stopped at its time limit. Only the solution's status distinguishes the two
    cases.
    """
    model.solve(solver)
    return bool(model.sol_status == pulp.LpSolutionOptimal)


def solve_relaxed(problem: MigrationInstance, gap: float, time_limit_s: float) -> RelaxedSolution | None:
    """Choose replicas for whole adapters and for shares of requests. Return None if the time limit was reached.

    The solver runs twice. The first run chooses the adapters of each replica, with any solution for the requests. The
    second run keeps this choice and is a linear program, solved by the simplex method. So its solution is a vertex: the
    number of split requests is at most the number of constraints on replicas, all other requests are whole, and
    rounding changes little. A solution of the same value that splits all requests alike could be rounded to no move at
    all.

    Args:
        problem: problem with at least one request.
        gap: largest relative distance of the choice of adapters from the best choice.
        time_limit_s: time limit of each run.
    """
    requests, replicas = problem.cost_s.shape
    model = pulp.LpProblem("adapters", pulp.LpMinimize)
    shares = [[model.add_variable(f"x_{i}_{j}", 0, 1) for j in range(replicas)] for i in range(requests)]
    adapters = _binary(model, "y", len(problem.adapters), replicas)
    _relaxed(model, problem, shares, adapters)
    _match(model, problem, shares, adapters)
    if not solve(model, _integer_solver(gap, time_limit_s)):
        return None
    allowed = _flags(adapters)

    model = pulp.LpProblem("requests", pulp.LpMinimize)
    shares = [[0] * replicas for _ in range(requests)]
    for i, j in product(range(requests), range(replicas)):
        k = problem.adapter_of[i]
        if k == NO_ADAPTER or allowed[k, j]:
            shares[i][j] = model.add_variable(f"x_{i}_{j}", 0, 1)
    longest = _relaxed(model, problem, shares, allowed.astype(int).tolist())
    if not solve(model, pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, solver="simplex")):
        return None
    return RelaxedSolution(np.array([[pulp.value(share) for share in row] for row in shares]), float(longest.value()))


def solve_full(problem: MigrationInstance, gap: float, time_limit_s: float) -> FullSolution | None:
    """Place whole requests on devices or hosts, within both memories. Return None if the time limit was reached.

    Args:
        problem: problem with at least one request.
        gap: largest relative distance of the solution from the best solution.
        time_limit_s: time limit of the run.
    """
    requests, replicas = problem.cost_s.shape
    model = pulp.LpProblem("full", pulp.LpMinimize)
    on_device = _binary(model, "g", requests, replicas)
    on_host = _binary(model, "h", requests, replicas)
    adapters = _binary(model, "y", len(problem.adapters), replicas)
    placed = [[on_device[i][j] + on_host[i][j] for j in range(replicas)] for i in range(requests)]
    swapped = [_dot(problem.request_s, _column(on_host, j)) for j in range(replicas)]
    _minimise_longest(model, problem, placed, adapters, swapped)
    _match(model, problem, placed, adapters)
    for j in range(replicas):
        held = _dot(problem.request_s, _column(on_device, j)) + _dot(problem.adapter_s, _column(adapters, j))
        model += held <= problem.device_s[j]
        model += swapped[j] <= problem.host_s[j]
    if not solve(model, _integer_solver(gap, time_limit_s)):
        return None
    hosts = _flags(on_host)
    devices = _flags(on_device)
    return FullSolution((hosts | devices).argmax(axis=1), np.logical_or.reduce(hosts, axis=1))


def rounded(shares: Floats, home: Ints) -> Ints:
    """Return the replica with the largest share of each request, ``[n]``.

    Among equal shares, the request's current replica is preferred, then the first.
    """
    largest = shares >= shares.max(axis=1, keepdims=True) - SAME_SHARE
    stays = largest[np.arange(len(home)), home]
    return np.where(stays, home, largest.argmax(axis=1))


def _integer_solver(gap: float, time_limit_s: float) -> pulp.HiGHS:
    """Return a solver for integer problems, without features that cost time and do not help this problem."""
    useless = {"presolve": "off", "mip_detect_symmetry": False, "mip_heuristic_run_feasibility_jump": False}
    return pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap, **useless)


def _binary(model: pulp.LpProblem, name: str, rows: int, columns: int) -> _Grid:
    return [[model.add_variable(f"{name}_{i}_{j}", cat="Binary") for j in range(columns)] for i in range(rows)]


def _flags(grid: _Grid) -> Flags:
    """Return whether each variable is 1."""
    return np.array([[variable.value() > 0.5 for variable in row] for row in grid], np.bool_)


def _column(grid: _Grid, j: int) -> list[_Sum]:
    return [row[j] for row in grid]


def _dot(weights: Iterable[float], values: Iterable[_Sum]) -> _Sum:
    return pulp.lpSum(float(weight) * value for weight, value in zip(weights, values, strict=True))


def _relaxed(model: pulp.LpProblem, problem: MigrationInstance, shares: _Grid, adapters: _Grid) -> _Sum:
    """Minimise the time of the busiest replica, where requests beyond a replica's memory are swapped.

    Return the time.
    """
    overs = [model.add_variable(f"over_{j}", 0) for j in range(len(problem.replicas))]
    for j, over in enumerate(overs):
        held = _dot(problem.request_s, _column(shares, j)) + _dot(problem.adapter_s, _column(adapters, j))
        model += over >= held - problem.device_s[j]
    return _minimise_longest(model, problem, shares, adapters, overs)


def _minimise_longest(
    model: pulp.LpProblem, problem: MigrationInstance, placed: _Grid, adapters: _Grid, swaps: list[_Sum]
) -> _Sum:
    """Minimise the time of the busiest replica, with each request placed once. Return the time."""
    longest = model.add_variable("longest", 0)
    away = [placed[i][j] for i, home in enumerate(problem.home) for j in range(len(problem.replicas)) if j != home]
    model += longest + MOVE_WEIGHT * problem.mean_s * pulp.lpSum(away)
    for row in placed:
        model += pulp.lpSum(row) == 1
    for j, swap in enumerate(swaps):
        busy = _dot(problem.cost_s[:, j], _column(placed, j)) + problem.affinity_s * pulp.lpSum(_column(adapters, j))
        model += longest >= busy + swap
    return longest


def _match(model: pulp.LpProblem, problem: MigrationInstance, placed: _Grid, adapters: _Grid) -> None:
    """Allow requests only at replicas that have their adapters."""
    for i, k in enumerate(problem.adapter_of):
        if k != NO_ADAPTER:
            for j in range(len(problem.replicas)):
                model += placed[i][j] <= adapters[k][j]
