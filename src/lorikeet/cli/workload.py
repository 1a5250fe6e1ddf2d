"""``lorikeet workload``: writes a workload file that the other commands read."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, given_options, note, output, write_json

if TYPE_CHECKING:
    from lorikeet.workloads.recipe import Recipe
    from lorikeet.workloads.workload_summary import WorkloadSummary

T = TypeVar("T")


def workload(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="JSON Lines to write.", dir_okay=False)],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A workload, Azure's CSV or Mooncake's JSONL to begin with.", exists=True),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="plain, chat (of --from), translation, agent, chatbot or conversations.")
    ] = "plain",
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, uniform, now or functions.")] = "poisson",
    rate: Annotated[
        str, typer.Option(help="Requests per second, or points: 0:2,400:2,900:8.", show_default="--from's own, or 1")
    ] = "",
    cv: Annotated[float, typer.Option(help="Variation of the gaps of gamma and functions; above 1 bursts.")] = 2.0,
    function_trace: Annotated[
        Path | None, typer.Option(help="A day of Azure's Functions trace of 2019, for functions.", exists=True)
    ] = None,
    minutes: Annotated[str, typer.Option(help="Minutes of --function-trace, first-last, counted from 1.")] = "1-1440",
    function_chunk: Annotated[
        int | None, typer.Option(min=1, help="Functions dealt out at a time.", show_default="one an adapter")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Requests.", show_default="1000, or all there are")] = None,
    duration_s: Annotated[float | None, typer.Option(help="Instead: all that arrive before.")] = None,
    adapters: Annotated[str, typer.Option(help="How many, or names separated by commas.")] = "0",
    ranks: Annotated[str, typer.Option(help="Ranks of the adapters in turn: 32, 8,16,64 or 8-128.")] = "8-128",
    adapter_choice: Annotated[
        str, typer.Option(help="uniform, zipf:A, skewed:X, rank-power:A, …: see docs/workloads.md.")
    ] = "uniform",
    prompt_tokens: Annotated[str, typer.Option(help="A number, or a range such as 64-256.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="A number, or a range such as 64-256.")] = "64",
    length_scale: Annotated[float, typer.Option(help="Factor on the lengths of --from.")] = 1.0,
    block_size: Annotated[
        int | None,
        typer.Option(min=2, help="Length of a prefix block before scaling.", show_default="the file's, or 32"),
    ] = None,
    most_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest request, prompt and answer together; longer ones are left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random choices.")] = 0,
    top: Annotated[int, typer.Option(min=0, help="Adapters in the table.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Write a workload and print a summary of it."""
    check_json_file(json_file)
    from lorikeet.workloads.arrivals import ARRIVALS, Rates
    from lorikeet.workloads.function_trace import read_function_trace
    from lorikeet.workloads.recipe import FUNCTION_ARRIVALS, SHAPE_NAMES, Recipe, without_effect
    from lorikeet.workloads.synthetic import parse_ranks, spread
    from lorikeet.workloads.workload import OptionError, Range, WorkloadError, block_tokens_of, read_any, write_workload
    from lorikeet.workloads.workload_summary import summarise_workload

    for flag, given, known in (
        ("--shape", shape, SHAPE_NAMES),
        ("--arrivals", arrivals, (*ARRIVALS, FUNCTION_ARRIVALS)),
    ):
        if given not in known:
            fail(f"{flag} {given!r} must be one of {', '.join(known)}", code=2)
    if function_trace is not None and arrivals != FUNCTION_ARRIVALS:
        fail("--function-trace goes with --arrivals functions", code=2)
    for flag, number in (("--length-scale", length_scale), ("--cv", cv), ("--duration-s", duration_s)):
        if number is not None and not number > 0:
            fail(f"{flag} {number:g} is not positive", code=2)
    useless = without_effect(given_options(context), shape, arrivals, has_trace=source is not None)
    if useless is not None:
        fail(f"--{useless[0].replace('_', '-')}: {useless[1]}", code=2)
    if not file.parent.is_dir():
        fail(f"there is no folder {str(file.parent)!r}", code=2)
    if not rate and source is None and function_trace is None and arrivals != "now":
        rate = "1"
    if arrivals == "now" and rate:
        fail(f"--arrivals now has no --rate, not {rate!r}", code=2)
    names = _names(adapters)
    kept_minutes = _minutes(minutes)
    try:
        recipe = Recipe(
            trace=tuple(read_any(source)) if source else (),
            shape=shape,
            arrivals=arrivals,
            function_minutes=read_function_trace(function_trace, kept_minutes) if function_trace else None,
            function_chunk=function_chunk,
            rates=_parsed("--rate", Rates.parse, rate) if rate else None,
            variation=cv,
            count=count,
            duration_s=duration_s,
            adapters=names,
            ranks=tuple(spread(_parsed("--ranks", parse_ranks, ranks), len(names))) if names else None,
            adapter_choice=adapter_choice,
            prompt_tokens=_parsed("--prompt-tokens", Range.parse, prompt_tokens),
            output_tokens=_parsed("--output-tokens", Range.parse, output_tokens),
            length_scale=length_scale,
            block_size=block_size or 0,
            most_tokens=most_tokens,
            seed=seed,
        )
        requests = recipe.requests()
    except (OptionError, WorkloadError) as error:
        fail(str(error), code=2)
    if not requests:
        fail("no request is left; nothing was written", code=2)
    write_workload(file, requests)
    summary = summarise_workload(requests)
    if write_json(json_file, _as_json(summary)):
        _print(output(), file, recipe, summary, top)
    if any(request.prefix_blocks for request in requests):
        note(f"prefix blocks of this file have {block_tokens_of(requests)} tokens, as each line states")


def _parsed(flag: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        fail(f"{flag}: {error}", code=2)


def _names(text: str) -> tuple[str, ...]:
    from lorikeet.workloads.synthetic import adapter_names

    if text.isdigit():
        return tuple(adapter_names(int(text)))
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _minutes(text: str) -> slice:
    from lorikeet.workloads.workload import Range

    first, last = _parsed("--minutes", Range.parse, text)
    if first < 1:
        fail(f"--minutes {text!r} counts from 1", code=2)
    return slice(first - 1, last)


def _print(console: Console, file: Path, recipe: "Recipe", summary: "WorkloadSummary", top: int) -> None:
    table = Table("figure", title=escape(str(file)), title_justify="left")
    table.add_column("value", justify="right")
    rows = {
        "requests": f"{summary.requests:,}",
        "conversations": f"{summary.conversations:,}" if summary.conversations else None,
        "span, s": f"{summary.span_s:,.1f}",
        "requests, /s": None if summary.rate is None else f"{summary.rate:.4g}",
        "variation of the gaps": None if summary.variation is None else f"{summary.variation:.2f}",
        "prefix blocks seen before": None if summary.known_share is None else f"{summary.known_share:.1%}",
        "adapters requested": f"{sum(name is not None for name, _ in summary.shares)} of {len(recipe.adapters)}"
        if recipe.adapters
        else None,
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    for name, tokens in (("prompt", summary.input_tokens), ("answer", summary.output_tokens)):
        table.add_row(f"{name} tokens", f"{tokens.total:,}")
        spread = f"{tokens.mean:,.1f}, {tokens.p50:,.0f}, {tokens.p99:,.0f}, {tokens.most:,}"
        table.add_row("  mean, P50, P99, most", spread)
    console.print(table)
    if top and any(name is not None for name, _ in summary.shares):
        console.print(_adapters_table(recipe, summary, top))


def _as_json(summary: "WorkloadSummary") -> dict[str, Any]:
    shares = [{"adapter": adapter, "share": share} for adapter, share in summary.shares]
    tokens = {name: getattr(summary, name)._asdict() for name in ("input_tokens", "output_tokens")}
    return {**summary._asdict(), **tokens, "shares": shares}


def _adapters_table(recipe: "Recipe", summary: "WorkloadSummary", top: int) -> Table:
    ranks = dict(zip(recipe.adapters, recipe.ranks or (), strict=False))
    more = f", {top} of {len(summary.shares)}" if len(summary.shares) > top else ""
    table = Table("adapter", title=f"Most requested adapters{more}", title_justify="left")
    for name in ("rank", "requests"):
        table.add_column(name, justify="right")
    for adapter, share in summary.shares[:top]:
        rank = ranks.get(adapter)
        table.add_row("[i]base[/]" if adapter is None else escape(adapter), str(rank or ""), f"{share:.1%}")
    return table
