"""``lorikeet simulate``: runs a workload on simulated engines, with step times from a cost profile."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, check_plot_file, fail, output, write_json
from lorikeet.cli.scenario_options import (
    AdapterChoice,
    Adapters,
    DurationS,
    Engine,
    Modules,
    Number,
    Ranks,
    SloLimits,
    SloTarget,
    Text,
    Tokens,
    Trace,
    Whole,
    scenario_flags,
    worker_processes,
)
from lorikeet.presets import resolve_preset

if TYPE_CHECKING:
    from lorikeet.bench.peak import Peak
    from lorikeet.simulator.run import ClusterFigures, ReplicaFigures
    from lorikeet.simulator.scenario import Scenario
    from lorikeet.simulator.study import ScenarioResult
    from lorikeet.simulator.trials import TrialResult


def simulate(
    context: typer.Context,
    scenario: Annotated[Path | None, typer.Argument(help="TOML file; flags win over it.", dir_okay=False)] = None,
    profile: Annotated[Text, typer.Option(help="Name (lorikeet profiles lists them) or .toml file.")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset to simulate; several are compared.", show_default="auto")
    ] = None,
    trace: Trace = None,
    shape: Annotated[
        Text, typer.Option(help="plain, chat (of --trace), translation, agent, chatbot or conversations.")
    ] = None,
    arrivals: Annotated[Text, typer.Option(help="poisson, gamma, uniform, now or functions.")] = None,
    rate: Annotated[Text, typer.Option(help="Requests per second, or points: 0:2,400:8.")] = None,
    cv: Annotated[Number, typer.Option(help="Variation of the gaps of gamma and functions.")] = None,
    count: Annotated[Whole, typer.Option(min=1, help="Requests.")] = None,
    duration_s: DurationS = None,
    adapters: Adapters = None,
    ranks: Ranks = None,
    modules: Modules = None,
    adapter_choice: AdapterChoice = None,
    prompt_tokens: Tokens = None,
    output_tokens: Tokens = None,
    length_scale: Annotated[Number, typer.Option(help="Factor on the lengths of --trace.")] = None,
    block_size: Annotated[
        Whole, typer.Option(min=2, help="Length of a prefix block before scaling; by default the trace's, or 32.")
    ] = None,
    most_tokens: Annotated[Whole, typer.Option(min=1, help="Leave out longer requests.")] = None,
    max_model_len: Annotated[Whole, typer.Option(min=1, help="Longest sequence; else the profile's.")] = None,
    engine: Engine = None,
    replicas: Annotated[Whole, typer.Option(min=1, help="Engines behind the preset's placement and routing.")] = None,
    cells: Annotated[
        Whole, typer.Option(min=1, help="Cut the replicas into cells, each in a process of its own.")
    ] = None,
    fetch: Annotated[
        Text, typer.Option(help="How adapters come from a replica to another: pipelined or store-and-forward.")
    ] = None,
    provisioned: Annotated[
        bool | None,
        typer.Option(help="Adapters are on their replicas at the start; else in their files only."),
    ] = None,
    slo: SloLimits = None,
    predictor: Annotated[Text, typer.Option(help="Predictor of answer lengths: oracle:0.8, history or none.")] = None,
    seed: Annotated[Whole, typer.Option(min=0, help="Seed of random choices.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to simulate with, from --seed on.")] = 1,
    processes: Annotated[
        Whole, typer.Option(min=1, help="Simulations at once, of several.", show_default="cores")
    ] = None,
    find_peak: Annotated[bool, typer.Option("--find-peak", help="Search the highest rate that meets the SLO.")] = False,
    slo_target: SloTarget = 0.9,
    top: Annotated[int, typer.Option(min=0, help="Adapters in the table.")] = 10,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write distributions there, as SVG; of a search at the peak.", dir_okay=False)
    ] = None,
) -> None:
    """Run a workload on simulated engines with a virtual clock. The same scenario always gives the same result."""
    from lorikeet.cli.load_tables import peak_words, probes_table
    from lorikeet.simulator.scenario import make_scenario
    from lorikeet.simulator.study import find_peak_rate, run_scenario
    from lorikeet.terminal import ProgressDisplay

    check_json_file(json_file)
    check_plot_file(plot)
    flags = scenario_flags(context.params) | {"preset": preset[0] if preset else None}
    peak = None
    try:
        asked = make_scenario(scenario, flags)
        if seeds > 1 or len(preset or ()) > 1:
            if find_peak:
                fail("--find-peak takes one --preset and one seed", code=2)
            _compare(asked, preset or [asked.preset], seeds, processes, json_file, plot)
            return
        with ProgressDisplay() as display:
            if find_peak:
                peak, outcomes = find_peak_rate(asked, display.show, slo_target, _first_rate(asked.rate))
            else:
                outcomes = [run_scenario(asked, display.show)]
    except ValueError as error:
        fail(str(error), code=2)
    shown = outcomes[0] if peak is None else _at_peak(peak, outcomes)
    if write_json(json_file, _report(outcomes, peak)):
        console = output()
        if peak is None:
            _print_outcome(console, shown, top)
        else:
            console.print(probes_table([(outcome.rate or 0.0, outcome.figures) for outcome in outcomes], slo_target))
            console.print(peak_words(peak))
    if plot is not None:
        plot.write_text(_plot(shown), encoding="utf-8")


def _compare(
    scenario: "Scenario",
    presets: list[str],
    seeds: int,
    processes: int | None,
    json_file: str | None,
    plot: Path | None,
) -> None:
    """Simulate each preset with each seed, and print a row for each preset. The best preset is marked.

    Raises:
        ValueError: the scenario is not valid.
    """
    import msgspec

    from lorikeet.simulator.trials import Trial, process_pool
    from lorikeet.terminal import ProgressDisplay

    for name in presets:
        resolve_preset(name)
    trials = [
        Trial(msgspec.structs.replace(scenario, preset=name, seed=scenario.seed + number))
        for name in presets
        for number in range(seeds)
    ]
    workers = min(worker_processes(processes), len(trials))
    with ProgressDisplay() as display:
        show = partial(display.show, "simulations")
        show(0, len(trials))
        with process_pool(workers, show) as pool:
            results = pool.all(trials)
    if error := next((each.error for each in results if each.error), ""):
        raise ValueError(error)
    found = {name: results[at * seeds : (at + 1) * seeds] for at, name in enumerate(presets)}
    best = max(presets, key=lambda name: _rank(found[name]))
    if write_json(json_file, {"best": best, "presets": msgspec.to_builtins(found)}):
        output().print(_comparison(found, best, scenario))
    if plot is not None:
        plot.write_text(_comparison_plot(found, best, scenario), encoding="utf-8")


def _rank(results: "list[TrialResult]") -> tuple[float, float]:
    """Return the sort key of presets: first the share of requests in time, then the smallest TTFT at P99."""
    return fmean(each.attainment or 0.0 for each in results), -fmean(each.ttft_p99_s for each in results)


def _comparison(found: "dict[str, list[TrialResult]]", best: str, scenario: "Scenario") -> Table:
    seeds = len(found[best])
    title = f"Presets, mean of {seeds} seeds (least – most)" if seeds > 1 else "Presets"
    rule = "best: most in time, then least TTFT P99"
    if all(each.attainment is None for results in found.values() for each in results):
        rule = "best: least TTFT P99"
    table = Table("preset", title=title, title_justify="left", padding=(0, 0), caption=rule if len(found) > 1 else None)
    for name in ("in time, %", "TTFT P50, s", "TTFT P99, s", "TPOT P99, ms", "E2E P99, s", "preemptions", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for name, results in found.items():
        shares = [each.attainment for each in results if each.attainment is not None]
        table.add_row(
            escape(name),
            _spread([100 * share for share in shares], 1) if shares else "-",
            *(_spread([getattr(each, key) for each in results], 3) for key in ("ttft_p50_s", "ttft_p99_s")),
            _spread([1e3 * each.tpot_p99_s for each in results], 1),
            _spread([each.e2e_p99_s for each in results], 2),
            _spread([each.preemptions for each in results], 0),
            "[bold green]best[/]" if name == best and len(found) > 1 else "",
        )
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{fmean(values):,.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"


def _comparison_plot(found: "dict[str, list[TrialResult]]", best: str, scenario: "Scenario") -> str:
    from lorikeet.simulator.plot import Bar, bar_panels

    limits = scenario.limits()

    def bars(key: str) -> list[Bar]:
        return [Bar(name, [getattr(each, key) for each in of], name == best) for name, of in found.items()]

    panels = [
        (label, limit_s, bars(key))
        for label, key, limit_s in (
            ("TTFT P99, s", "ttft_p99_s", limits.ttft_s),
            ("TPOT P99, s", "tpot_p99_s", limits.tpot_s),
            ("E2E P99, s", "e2e_p99_s", limits.e2e_s),
        )
    ]
    return bar_panels(f"{scenario.profile}, {len(found[best])} seeds, modelled", panels)


def _first_rate(text: str) -> float:
    """Return the first rate of a peak search, which refuses a list of rates."""
    if not text or ":" in text:
        return 1.0
    try:
        return float(text)
    except ValueError:
        fail(f"--rate {text!r} is not a number", code=2)


def _print_outcome(console: Console, outcome: "ScenarioResult", top: int) -> None:
    from lorikeet.cli.load_tables import adapters_table, errors_table, times_table, totals_table
    from lorikeet.simulator.study import counters

    figures = outcome.figures
    profile = outcome.profile
    console.print(
        f"modelled on a virtual clock by profile [bold]{escape(profile.name)}[/] ({escape(profile.origin)})",
        soft_wrap=True,
    )
    for text in outcome.simulated.notes:
        console.print(f"  {escape(text)}", soft_wrap=True)
    console.print(times_table(figures, "held for the answer before", has_client=False))
    console.print(totals_table(figures, None, {}))
    table = Table("engine", title="Engine", title_justify="left")
    table.add_column("count", justify="right")
    for name, value in counters(outcome.simulated.stats).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    console.print(table)
    if outcome.simulated.cluster is not None:
        _print_cluster(console, outcome.simulated.cluster)
    if top and any(each.adapter is not None for each in figures.adapters):
        console.print(adapters_table(figures.adapters, top))
    if figures.errors:
        console.print(errors_table(figures.errors))


_MOST_ROWS = 32
"""With more replicas the table has the least, median and most of each figure; ``--json`` has all."""


def _rows(replicas: "Sequence[ReplicaFigures]") -> "list[tuple[str, ReplicaFigures]]":
    """Return the rows of the table of replicas, by name."""
    import msgspec

    if len(replicas) <= _MOST_ROWS:
        return [(each.replica, each) for each in replicas]
    columns = {field: sorted(getattr(each, field) for each in replicas) for field in replicas[0].__struct_fields__}
    last = len(replicas) - 1
    return [
        (name, msgspec.structs.replace(replicas[0], **{field: values[at] for field, values in columns.items()}))
        for name, at in (("least", 0), ("median", last // 2), ("most", last))
    ]


def _print_cluster(console: Console, cluster: "ClusterFigures") -> None:
    count = len(cluster.replicas)
    title = "Replicas" if count <= _MOST_ROWS else f"{count:,} replicas, each column by itself"
    table = Table(title=title, title_justify="left", padding=(0, 0))
    table.add_column("replica" if count <= _MOST_ROWS else "", no_wrap=True)
    for name in (
        *("requests", "output\ntokens", "busy", "adapters\nrouted, mean", "most"),
        *("held,\nmean", "most", "GB held,\nmean", "most"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, each in _rows(cluster.replicas):
        table.add_row(
            name,
            f"{each.requests:,}",
            f"{each.output_tokens:,}",
            f"{each.busy_share:.1%}",
            *(f"{each.routed_mean:.1f}", str(each.routed_most), f"{each.held_mean:.1f}", str(each.held_most)),
            *(f"{size_bytes / 1e9:.2f}" for size_bytes in (each.held_bytes_mean, each.held_bytes_most)),
        )
    console.print(table)
    held = "" if cluster.held_share is None else f", mean per replica {cluster.held_share:.1%} of all"
    console.print(
        f"adapters: {cluster.adapters}, {cluster.adapter_bytes / 1e9:.2f} GB{held}; "
        f"{cluster.fetches} fetched ({cluster.fetched_bytes / 1e9:.2f} GB), {cluster.provisions} from files, "
        f"{cluster.deletes} copies deleted; {cluster.placements} placements after the first; "
        f"{cluster.moves} requests moved",
        soft_wrap=True,
    )


def _report(outcomes: "list[ScenarioResult]", peak: "Peak | None") -> dict[str, Any]:
    """Return the report as JSON data; a search's report omits single requests."""
    if peak is None:
        (outcome,) = outcomes
        return {**outcome.report(), "requests": outcome.simulated.run.exchanges}
    probes = [outcome.report() for outcome in outcomes]
    return {"peak_rate": peak.rate, "missed_rate": peak.missed_rate, "probes": probes}


def _at_peak(peak: "Peak", outcomes: "list[ScenarioResult]") -> "ScenarioResult":
    """Return the probe at the highest rate that met the SLO, or else at the lowest rate tried."""
    rate = peak.missed_rate if peak.rate is None else peak.rate
    return next(outcome for outcome in outcomes if outcome.rate == rate)


def _plot(outcome: "ScenarioResult") -> str:
    from lorikeet.simulator.plot import Panel, distribution_panels

    limits = outcome.scenario.limits()
    whole = [exchange for exchange in outcome.simulated.run.exchanges if exchange.error is None]
    panels = [
        Panel("TTFT", [exchange.ttft_s or 0.0 for exchange in whole], limits.ttft_s),
        Panel("TPOT", [exchange.tpot_s or 0.0 for exchange in whole], limits.tpot_s),
        Panel("E2E", [exchange.e2e_s for exchange in whole], limits.e2e_s),
    ]
    rate = "" if outcome.rate is None else f" at {outcome.rate:.4g} requests/s"
    return distribution_panels(f"{outcome.scenario.preset}{rate} by {outcome.profile.name}, modelled", panels)
