"""``lorikeet plan``: finds, by simulation, the cheapest devices, replicas and preset that meet an SLO."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, check_plot_file, fail, output, parse_size, write_json
from lorikeet.cli.scenario_options import (
    AdapterChoice,
    Adapters,
    DurationS,
    Engine,
    Modules,
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

if TYPE_CHECKING:
    from lorikeet.core.request import Slo
    from lorikeet.simulator.planner import Candidate, Judged, Plan, PricedProfile
    from lorikeet.simulator.scenario import Scenario
    from lorikeet.simulator.trials import TrialResult


def plan(
    context: typer.Context,
    scenario: Annotated[
        Path | None, typer.Argument(help="TOML file of a workload, as for simulate; flags override it.", dir_okay=False)
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PRICE", help="Device or profile, and its price of an hour: h100=4; repeatable."),
    ] = None,
    model: Annotated[str, typer.Option(help="Base model of the profiles.")] = "llama-2-7b",
    tensor_parallel: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Devices of a replica to try; repeatable.", show_default="the two least that hold the model"
        ),
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to try; repeatable.", show_default="auto")] = None,
    host_memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a replica's host to try; repeatable.",
            show_default="none, and twice that of all adapters",
        ),
    ] = None,
    max_replicas: Annotated[int, typer.Option(min=1, help="Most replicas to try.")] = 8,
    trace: Trace = None,
    arrivals: Annotated[Text, typer.Option(help="poisson, gamma, uniform or functions.")] = None,
    rate: Annotated[Text, typer.Option(help="Requests per second.")] = None,
    count: Annotated[Whole, typer.Option(min=1, help="Requests of a simulation; by default two minutes.")] = None,
    duration_s: DurationS = None,
    adapters: Adapters = None,
    ranks: Ranks = None,
    modules: Modules = None,
    adapter_choice: AdapterChoice = None,
    prompt_tokens: Tokens = None,
    output_tokens: Tokens = None,
    engine: Engine = None,
    slo: SloLimits = None,
    slo_target: SloTarget = 0.99,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of a candidate; it must meet the SLO in all.")] = 3,
    unseen: Annotated[int, typer.Option(min=0, help="Further seeds that the choice is checked with.")] = 5,
    processes: Annotated[Whole, typer.Option(min=1, help="Simulations at once.", show_default="cores")] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write cost against attainment there, as SVG.", dir_okay=False)
    ] = None,
) -> None:
    """Search the cheapest devices, replicas, presets and memory that meet an SLO, by simulation.

    Prices may be in any currency. Candidates are tried from the cheapest on. The choice is then simulated with further
    seeds, and with more load, to show which limit breaks first.
    """
    from lorikeet.simulator.planner import Planner
    from lorikeet.simulator.scenario import make_scenario
    from lorikeet.simulator.trials import process_pool
    from lorikeet.terminal import ProgressDisplay

    check_json_file(json_file)
    check_plot_file(plot)
    if not device:
        fail("--device: name at least one with its price, such as a100-80=2", code=2)
    workers = worker_processes(processes)
    try:
        hardware = _hardware(device, model, tensor_parallel)
        asked = make_scenario(scenario, {"profile": hardware[0].profile, **scenario_flags(context.params)})
        sizes = _host_sizes(host_memory, asked, hardware[0])
        candidates = _candidates(hardware, preset or [asked.preset], sizes, max_replicas)
        with ProgressDisplay() as display:

            def show(done: int, expected: int, left_s: float | None) -> None:
                display.show("simulations", done, expected, left_s)

            display.show("simulations", 0, len(candidates))
            with process_pool(workers, show) as pool:
                found = Planner(asked, candidates, slo_target, seeds, pool).plan(unseen)
    except ValueError as error:
        fail(str(error), code=2)
    if write_json(json_file, _report(found, asked)):
        _print(output(), found, asked)
    if plot is not None:
        plot.write_text(_plot(found, asked), encoding="utf-8")
    if found.choice is None:
        raise typer.Exit(1)


def _hardware(devices: Sequence[str], model: str, degrees: Sequence[int] | None) -> "list[PricedProfile]":
    """Return the profiles of the named devices, with their prices.

    Raises:
        ValueError: a device is unknown, has no price, or the model does not fit.
    """
    from lorikeet.costs.catalog import load_profile, profile_names
    from lorikeet.costs.devices import DEVICES
    from lorikeet.simulator.planner import PricedProfile

    known = set(profile_names())
    found = list[PricedProfile]()
    for text in devices:
        name, _, price_text = text.rpartition("=")
        try:
            price = float(price_text)
        except ValueError:
            price = -1.0
        if not name or not price > 0:
            raise ValueError(f"--device {text!r} must be NAME=PRICE, such as a100-80=2")
        if name not in DEVICES:
            if name not in known and not name.endswith(".toml") and "@" not in name:
                raise ValueError(f"--device {name!r} is neither a profile nor a device: {', '.join(sorted(DEVICES))}")
            profile = load_profile(name)
            found.append(PricedProfile(name, profile.tensor_parallel, price))
            continue
        names = {ranks: f"{name}x{ranks}-{model}" if ranks > 1 else f"{name}-{model}" for ranks in range(1, 17)}
        fitting = [ranks for ranks in names if names[ranks] in known]
        wanted = [ranks for ranks in degrees or fitting[:2] if ranks in fitting]
        if not wanted:
            load_profile(names[degrees[0] if degrees else 1])  # This call raises an error with the reason.
            raise ValueError(f"--device {name}: {model} does not fit into the device")
        found += [PricedProfile(names[ranks], ranks, price) for ranks in wanted]
    return found


def _host_sizes(given: Sequence[str] | None, scenario: "Scenario", hardware: "PricedProfile") -> list[int]:
    from lorikeet.costs.catalog import load_profile

    if given:
        return [parse_size(text) for text in given]
    if "host_memory_bytes" in scenario.engine:
        return [int(scenario.engine["host_memory_bytes"])]
    workload = scenario.recipe().requests()
    refs = scenario.adapter_refs(load_profile(hardware.profile).geometry, workload)
    twice = 2 * sum(each.weight_bytes for each in refs.values())
    return [0, twice] if twice else [0]


def _candidates(
    hardware: "Sequence[PricedProfile]", presets: Sequence[str], sizes: Sequence[int], most: int
) -> "list[Candidate]":
    from lorikeet.presets import resolve_preset
    from lorikeet.simulator.planner import Candidate

    for preset in presets:
        resolve_preset(preset)
    return [
        Candidate(each, preset, size_bytes, replicas)
        for each in hardware
        for preset in presets
        for size_bytes in sizes
        for replicas in range(1, most + 1)
    ]


def _words(candidate: "Candidate") -> str:
    from lorikeet.core.text import format_size

    host = format_size(candidate.host_memory_bytes) if candidate.host_memory_bytes else "no host memory"
    return f"{candidate.replicas} × {candidate.hardware.profile}, {candidate.preset}, {host}"


def _print(console: Console, found: "Plan", scenario: "Scenario") -> None:
    limits = scenario.limits()
    table = Table(title="Candidates that were simulated, from the cheapest on", title_justify="left", padding=(0, 0))
    table.add_column("candidate", no_wrap=True)
    for name in (
        "price\nof an hour",
        "in time,\nleast",
        "in time,\nmost",
        "TTFT P99,\ns",
        "TPOT P99,\nms",
        "simulated\nseeds",
        "",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.judged:
        table.add_row(*_row(each, found))
    console.print(table)
    if found.choice is None:
        console.print(f"none of them meets the SLO for {found.target:.1%} of the requests; try more --max-replicas")
        return
    best = found.choice.candidate
    console.print(f"cheapest: [bold]{escape(_words(best))}[/], {best.cost:g} an hour", soft_wrap=True)
    console.print(f"  {found.choice.attainment:.2%} of the requests in time at least; the target is {found.target:.1%}")
    if found.unseen:
        met = sum(each.meets(found.target) for each in found.unseen)
        least = min(each.attainment or 0.0 for each in found.unseen)
        console.print(f"  with {len(found.unseen)} unseen seeds: met with {met}, {least:.2%} in time at least")
    for text in _margin_words(found, limits):
        console.print(f"  {text}", soft_wrap=True)


def _row(judged: "Judged", found: "Plan") -> list[str]:
    error = next((each.error for each in judged.results if each.error), "")
    shares = [each.attainment or 0.0 for each in judged.results]
    at_most = "≤ " if all(each.stopped_after for each in judged.results) else ""
    ttft_s, tpot_s = (max(getattr(each, name) for each in judged.results) for name in ("ttft_p99_s", "tpot_p99_s"))
    seeds = str(len(judged.full)) if judged.full else "beginning"
    if error:
        verdict = f"[red]{escape(error[:60])}[/]"
    elif judged is found.choice:
        verdict = "[bold green]best[/]"
    else:
        verdict = "[red]missed[/]" if judged.is_done else "not needed"
    numbers = (
        f"{at_most}{min(shares):.1%}",
        f"{at_most}{max(shares):.1%}",
        f"{ttft_s:.2f}" if ttft_s else "–",
        f"{1e3 * tpot_s:.0f}" if tpot_s else "–",
        seeds,
    )
    return [escape(_words(judged.candidate)), f"{judged.candidate.cost:g}", *numbers, verdict]


def _margin_words(found: "Plan", limits: "Slo") -> list[str]:
    """Return the load margin of the choice, and the limit that higher load would miss first."""
    if not found.loads:
        return ["margin in load: not known, since these arrivals cannot be made denser"]
    said = [f"margin: still met with {found.margin:g} times the load"]
    if found.margin == 1:
        said = [f"margin: none, {found.loads[0].factor:g} times the load misses already"]
    broken = found.breaks
    if broken is None:
        return [f"{said[0]}, the most that was tried"]
    result = broken.result
    if result.error:
        return [*said, f"what breaks first: with {broken.factor:g} times the load, {result.error}"]
    missed = ", ".join(
        f"{name} of {share:.1%}" for name, share in sorted(result.missed.items(), key=lambda m: -m[1]) if share
    )
    said.append(
        f"what breaks first: with {broken.factor:g} times the load the requests miss {missed}{_cause(result, limits)}"
    )
    return said


def _cause(result: "TrialResult", limits: "Slo") -> str:
    """Return the likeliest cause of missed TTFT limits."""
    if result.preemptions:
        return f"; KV does not fit, {result.preemptions} sequences were preempted"
    if limits.ttft_s is not None and result.ttft_p50_s < limits.ttft_s / 4 and result.cold_ttft_p99_s > limits.ttft_s:
        return "; those that wait for an adapter's first load"
    if limits.ttft_s is not None and result.missed.get("TTFT", 0.0) > 0:
        return "; they wait in the queue"
    return ""


def _report(found: "Plan", scenario: "Scenario") -> dict[str, Any]:
    def described(judged: "Judged") -> dict[str, Any]:
        candidate = judged.candidate
        return {
            "profile": candidate.hardware.profile,
            "preset": candidate.preset,
            "host_memory_bytes": candidate.host_memory_bytes,
            "replicas": candidate.replicas,
            "cost": candidate.cost,
            "met": judged.meets(found.target, found.seeds),
            "short": msgspec.to_builtins(judged.short),
            "full": msgspec.to_builtins(judged.full),
        }

    broken = found.breaks
    return {
        "scenario": msgspec.structs.asdict(scenario),
        "slo_target": found.target,
        "choice": None if found.choice is None else described(found.choice),
        "unseen": msgspec.to_builtins(found.unseen),
        "load_margin": found.margin if found.loads else None,
        "breaks": None if broken is None else {"load": broken.factor, **msgspec.to_builtins(broken.result)},
        "candidates": [described(each) for each in found.judged],
    }


def _plot(found: "Plan", scenario: "Scenario") -> str:
    from lorikeet.simulator.plot import CostPoint, cost_plot

    points = [
        CostPoint(_words(each.candidate), each.candidate.cost, each.attainment, each is found.choice)
        for each in found.judged
    ]
    return cost_plot(f"Plan for {scenario.slo}, modelled", points, found.target)
