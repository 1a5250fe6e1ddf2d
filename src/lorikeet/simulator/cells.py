"""Simulates a cluster that is cut into cells (docs/decisions/cells.md).

Each cell has separate replicas, routing and orchestrator, and shares nothing with other cells. So each cell is
simulated in a separate process.
"""

import multiprocessing
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import fmean
from typing import NamedTuple

import msgspec

from lorikeet.bench.in_process import WorkloadRun
from lorikeet.core.machine import usable_cores
from lorikeet.simulator.run import ClusterFigures, Simulated
from lorikeet.simulator.scenario import ScenarioError
from lorikeet.workloads.workload import WorkloadRequest


class Cells(NamedTuple):
    """Lists the adapters and requests of each cell.

    Attributes:
        adapters: names of the adapters of each cell. A popular adapter is in several cells.
        requests: indices of the requests of each cell, in the order of the workload.
    """

    adapters: list[list[str]]
    requests: list[list[int]]


def cut_into_cells(workload: Sequence[WorkloadRequest], adapters: Sequence[str], cells: int) -> Cells:
    """Assign adapters to cells by the number of tokens of their requests, and requests to a cell of their adapter.

    Adapters are placed by decreasing demand, each in the cell with the least demand so far. Adapters without demand are
    placed in the cell with the fewest adapters. An adapter with more than a cell's share of all demand gets as many
    cells as its demand has shares, rounded up. The base model is in all cells. Requests whose adapter is in several
    cells are sent to these cells in turn. The requests of a conversation stay together.

    Raises:
        ScenarioError: a cell would get no request.
    """
    demand: dict[str | None, int] = {None: 0, **dict.fromkeys(adapters, 0)}
    for request in workload:
        demand[request.adapter] += request.input_tokens + request.output_tokens
    share = max(1.0, sum(demand.values()) / cells)
    load = [0.0] * cells
    found = Cells([[] for _ in range(cells)], [[] for _ in range(cells)])
    homes: dict[str | None, list[int]] = {None: list(range(cells))}
    for name in sorted(adapters, key=lambda name: -demand[name]):
        copies = min(cells, max(1, -int(-demand[name] // share)))
        homes[name] = sorted(
            range(cells), key=lambda cell: (load[cell] if demand[name] else 0.0, len(found.adapters[cell]))
        )[:copies]
        for home in homes[name]:
            load[home] += demand[name] / copies
            found.adapters[home].append(name)
    taken = dict.fromkeys(homes, 0)
    of_conversation: dict[tuple[str | None, str], int] = {}
    for index, request in enumerate(workload):
        adapter = request.adapter
        conversation = request.conversation
        cell = None if conversation is None else of_conversation.get((adapter, conversation))
        if cell is None:
            cell = homes[adapter][taken[adapter] % len(homes[adapter])]
            taken[adapter] += 1
            if conversation is not None:
                of_conversation[adapter, conversation] = cell
        found.requests[cell].append(index)
    if not all(found.requests):
        raise ScenarioError(f"cells {cells}: not every cell would get a request")
    return found


def simulate_cells(
    run_cell: Callable[[int], Simulated], cells: int, show: Callable[[str, int, int], None]
) -> Simulated:
    """Run every cell in a separate process, one per core at a time, and return all cells as one run.

    Args:
        run_cell: runs the cell with a given number; picklable.
        cells: number of cells.
        show: called with (stage, cells that have ended, cells).

    Raises:
        ValueError: see ``run_scenario``.
    """
    show("cells", 0, cells)
    context = multiprocessing.get_context("spawn")
    workers = min(cells, len(usable_cores()))
    # A process ends with its cell, so that its memory is free when the results are combined.
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as executor:
        futures = [executor.submit(run_cell, cell) for cell in range(cells)]
        for done, _ in enumerate(as_completed(futures), start=1):
            show("cells", done, cells)
        return _joined([future.result() for future in futures])


def _joined(simulated: Sequence[Simulated]) -> Simulated:
    """Return the cells' runs as one. Requests are in the order of their arrival."""
    exchanges = sorted((each for cell in simulated for each in cell.run.exchanges), key=lambda each: each.due_s)
    gaps_s = array("d")
    for cell in simulated:
        gaps_s.extend(cell.run.gaps_s)
    note = f"{len(simulated)} cells, of {_counts(simulated)} requests; of each: "
    return Simulated(
        WorkloadRun(exchanges, gaps_s),
        tuple(stats for cell in simulated for stats in cell.stats),
        (note + simulated[0].notes[0], *simulated[0].notes[1:]),
        _joined_figures([cell.cluster for cell in simulated if cell.cluster is not None]),
    )


def _counts(simulated: Sequence[Simulated]) -> str:
    counts = [len(cell.run.exchanges) for cell in simulated]
    return f"{min(counts):,} to {max(counts):,}"


def _joined_figures(cells: Sequence[ClusterFigures]) -> ClusterFigures:
    replicas = tuple(
        msgspec.structs.replace(each, replica=f"cell-{number}/{each.replica}")
        for number, cell in enumerate(cells)
        for each in cell.replicas
    )
    adapter_bytes = sum(cell.adapter_bytes for cell in cells)
    held_bytes = fmean(each.held_bytes_mean for each in replicas)
    sums = {
        name: sum(getattr(cell, name) for cell in cells)
        for name in (
            *("adapters", "placements", "fetches", "fetched_bytes", "provisions", "provided_bytes"),
            *("deletes", "moves"),
        )
    }
    return ClusterFigures(
        duration_s=max(cell.duration_s for cell in cells),
        adapter_bytes=adapter_bytes,
        held_share=held_bytes / adapter_bytes if adapter_bytes else None,
        replicas=replicas,
        **sums,
    )
