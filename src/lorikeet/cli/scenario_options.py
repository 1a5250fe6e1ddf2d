"""Defines the options of a simulated scenario, which ``simulate`` and ``plan`` share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from lorikeet.cli.console import fail
from lorikeet.core.machine import usable_cores

Text = str | None
Whole = int | None
Number = float | None

Trace = Annotated[Text, typer.Option(help="A workload, Azure's CSV or Mooncake's JSONL.")]
DurationS = Annotated[Number, typer.Option(help="Seconds of arrivals, in place of a number of requests.")]
Adapters = Annotated[Whole, typer.Option(min=0, help="Number of adapters.")]
Ranks = Annotated[Text, typer.Option(help="Ranks of the adapters in turn: 32, 8,16,64 or 8-128.")]
Modules = Annotated[Text, typer.Option(help="Modules that the adapters change; q,k,v,o by default.")]
AdapterChoice = Annotated[Text, typer.Option(help="Rule for the adapter of each request: see docs/workloads.md.")]
Tokens = Annotated[Text, typer.Option(help="A number, or a range such as 64-256.")]
Engine = Annotated[list[str] | None, typer.Option(help="Engine setting, such as max_num_seqs=256.")]
SloLimits = Annotated[Text, typer.Option(help="Limits in seconds, such as ttft=0.5,tpot=0.1.")]
SloTarget = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet the SLO.")]


def scenario_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command that are fields of a scenario, without ``preset``: commands take several.

    End the command if an ``--engine`` is not KEY=VALUE.
    """
    from lorikeet.simulator.scenario import Scenario

    flags = {name: options[name] for name in Scenario.__struct_fields__ if name in options and name != "preset"}
    return flags | {"engine": _engine_settings(options["engine"]) if options["engine"] else None}


def _engine_settings(pairs: Sequence[str]) -> dict[str, str]:
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            fail(f"--engine {pair!r} is not KEY=VALUE, such as max_num_seqs=256", code=2)
        given[name.strip()] = value.strip()
    return given


def worker_processes(asked: int | None) -> int:
    """Return the number of simulations that run at the same time: ``--processes``, or one per core."""
    return asked or len(usable_cores())
