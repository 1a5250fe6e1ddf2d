"""``lorikeet bench serve``: sends load to any OpenAI-compatible server and reports latency and throughput."""

import time
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from lorikeet import __version__
from lorikeet.cli.console import JsonFile, check_json_file, fail, given_options, note, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.http.urls import server_root, unix_socket

if TYPE_CHECKING:
    from lorikeet.bench.load_report import RequestResult
    from lorikeet.bench.load_run import LoadRun
    from lorikeet.bench.peak import Peak

_REQUESTS = 100
_FIRST_RATE = 1.0
_BURSTINESS = 0.25


def bench_serve(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str, typer.Option(help="Base model.", show_default="the first one listed")] = "",
    adapters: Annotated[str, typer.Option(help="Names, separated by commas, or 'all' that are listed.")] = "",
    adapter_choice: Annotated[
        str,
        typer.Option(help="uniform, round-robin, distinct, zipf:A, skewed:X, drifting:ALPHA:SECONDS, functions:CHUNK."),
    ] = "uniform",
    adapter_as: Annotated[str, typer.Option(help="How 'model' names an adapter.")] = "{adapter}",
    requests: Annotated[int | None, typer.Option(min=1, help="How many.", show_default="100 or the workload's")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.", show_default="all at once")] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma (or bursty, the same), uniform or now.", show_default="poisson")
    ] = "",
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of gamma gaps; below 1 bursts.", show_default="0.25")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="JSON Lines, Azure's CSV or Mooncake's JSONL.", exists=True, dir_okay=False)
    ] = None,
    length_scale: Annotated[float, typer.Option(help="Factor on a workload's lengths.")] = 1.0,
    prefix_block_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Length of a workload's prefix block before scaling.", show_default="the file's"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=0, help="Most requests in flight; 0: no limit.")] = 0,
    prompt_tokens: Annotated[str, typer.Option(help="A number, or a range such as 64-256.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="A number, or a range such as 64-256.")] = "64",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    text: Annotated[bool, typer.Option("--text", help="Send words, for servers that take no token ids.")] = False,
    token_ids: Annotated[str, typer.Option(help="Range of the prompts' token ids.")] = "300-10000",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly the length.")] = True,
    usage_per_event: Annotated[bool, typer.Option("--usage-per-event", help="Count tokens in every event.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(help="After which a request has failed.")] = 600.0,
    tenant_header: Annotated[str, typer.Option(help="Header to send a workload's tenants in, such as X-Tenant.")] = "",
    warmup: Annotated[int, typer.Option(min=0, help="Requests to the base before the measured ones.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, adapters, lengths and prompts.")] = 0,
    slo: Annotated[str, typer.Option(help="Limits in seconds, such as ttft=0.5,tpot=0.1,e2e=10.")] = "",
    find_peak: Annotated[bool, typer.Option("--find-peak", help="Search the highest rate that meets the SLO.")] = False,
    slo_target: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet it.")] = 0.9,
    probe_s: Annotated[
        float | None,
        typer.Option(min=0.01, help="Length of each probe of the search.", show_default="30, or 10 × limits on delays"),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Adapters in the table.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Send requests to any OpenAI-compatible server, open loop, and print latency and throughput."""
    from lorikeet.bench.load_client import ENDPOINTS, LoadTarget
    from lorikeet.bench.load_run import LoadRunner
    from lorikeet.terminal import ProgressDisplay
    from lorikeet.workloads.arrivals import ARRIVALS
    from lorikeet.workloads.recipe import Recipe
    from lorikeet.workloads.workload import OptionError, Range, WorkloadError, parse_slo, read_any

    # vLLM's benchmark has the same default.
    if arrivals == "bursty" or (burstiness is not None and not arrivals and workload is None):
        arrivals = "gamma"
    if burstiness is not None and not 0 < burstiness < inf:
        fail(f"--burstiness {burstiness} is not a positive number", code=2)
    _check_effects(context, arrivals or "poisson", has_workload=workload is not None)
    for given, known in ((endpoint, tuple(ENDPOINTS)), (arrivals or "poisson", ARRIVALS)):
        if given not in known:
            fail(f"{given!r} must be one of {', '.join(known)}", code=2)
    has_rate = rate is not None or find_peak
    if arrivals and (workload is not None or has_rate == (arrivals == "now")):
        fail("--arrivals goes with a --rate (or now, without one), and not with a --workload", code=2)
    if not _is_name_form(adapter_as):
        fail(f"{adapter_as!r} may contain {{base}} and {{adapter}}, and no other braces", code=2)
    check_json_file(json_file)
    if rate is not None and not 0 < rate < inf:
        fail(f"a rate of {rate} is not a positive number", code=2)
    if find_peak and not slo and workload is None:
        fail("--find-peak needs limits, such as --slo ttft=0.5,tpot=0.1", code=2)
    if find_peak and requests is not None:
        fail("--requests has no effect on --find-peak: --probe-s sets the length of its probes", code=2)
    if find_peak and concurrency:
        fail("--concurrency would hold back the requests whose waiting --find-peak looks for", code=2)
    if unix_socket(url):
        fail(f"--url {url}: bench serve needs an http:// URL: start the server without --uds", code=2)
    url = server_root(url)
    try:
        given_requests = tuple(read_any(workload)) if workload else ()
        if workload and not given_requests:
            fail(f"{workload} holds no request", code=2)
        base, names = _models(ServerClient(url, api_key), model, adapters)
        target = LoadTarget(
            url=url,
            base=base,
            endpoint=endpoint,
            api_key=api_key or "",
            adapter_as=adapter_as,
            text=text,
            ignore_eos=ignore_eos,
            usage_per_event=usage_per_event,
            temperature=temperature,
            timeout_s=timeout_s,
            tenant_header=tenant_header,
        )
        recipe = Recipe(
            trace=given_requests,
            adapters=names,
            adapter_choice=adapter_choice,
            arrivals=arrivals or "poisson",
            variation=(_BURSTINESS if burstiness is None else burstiness) ** -0.5,
            prompt_tokens=Range.parse(prompt_tokens),
            output_tokens=Range.parse(output_tokens),
            length_scale=length_scale,
            block_size=prefix_block_tokens or 0,
            seed=seed,
        )
        with ProgressDisplay() as display:
            runner = LoadRunner(
                target,
                recipe,
                parse_slo(slo),
                concurrency=concurrency,
                ids=Range.parse(token_ids),
                show=display.show,
            )
            failed = runner.warm_up(warmup)
            if failed is not None:
                fail(f"a request before the measured ones failed, {failed.error}: {failed.message}")
            probes_s = probe_s or runner.min_probe_s
            if find_peak:
                peak, runs = runner.find_peak(slo_target, rate or _FIRST_RATE, probes_s)
            else:
                peak = None
                runs = [runner.run(requests or len(given_requests) or _REQUESTS, rate)]
    except (OptionError, WorkloadError) as error:
        fail(str(error), code=2)

    setup = {name: value for name, value in context.params.items() if name not in ("api_key", "json_file")}
    setup |= {"base": base, "adapters": names, "lorikeet": __version__, "unix_s": time.time()}
    if write_json(json_file, _report(setup, runs, peak)):
        console = output()
        if peak is None:
            _print_run(console, runs[0], top)
        else:
            _print_peak(console, peak, runs, slo_target)
    if peak is None:
        if runs[0].is_client_bound:
            note("this client was late or busy (see its rows above); the figures may be its own and not the server's")
    else:
        _note_doubtful_probes(peak, runs)
        if given_requests and peak.missed_rate is None:
            note(f"{workload} holds too few requests for probes of {probes_s:g} s at higher rates")
        if probes_s < runner.min_probe_s:
            note(f"probes shorter than {runner.min_probe_s:g} s may not show that a rate is too high for these limits")
    if not any(run.figures.completed for run in runs):
        fail("no request was answered whole")


def _check_effects(context: typer.Context, arrivals: str, *, has_workload: bool) -> None:
    """End the command if a given option would have no effect."""
    from lorikeet.workloads.recipe import without_effect

    given = given_options(context)
    useless = without_effect([name for name in given if name != "arrivals"], "plain", arrivals, has_trace=has_workload)
    if useless is None and not context.params["find_peak"]:
        useless = next(((name, "goes with --find-peak") for name in ("slo_target", "probe_s") if name in given), None)
    if useless is not None:
        fail(f"--{useless[0].replace('_', '-')}: {useless[1]}", code=2)


def _is_name_form(text: str) -> bool:
    try:
        text.format(base="", adapter="")
    except (IndexError, KeyError, ValueError):
        return False
    return True


def _models(api: ServerClient, base: str, adapters: str) -> tuple[str, tuple[str | None, ...]]:
    """Return the base model's name and the adapters to choose from (None for the base). Lists models only if needed."""
    cards = api.get("/v1/models")["data"] if not base or adapters == "all" else []
    if not base and not cards:
        fail("the server lists no model; name one: --model")
    base = base or cards[0]["id"]
    if adapters == "all":
        names = [card["id"] for card in cards if card.get("parent") == base]
        if not names:
            fail(f"the server lists no adapters of {base!r}; name them: --adapters a,b", code=2)
    else:
        names = [name.strip() for name in adapters.split(",") if name.strip()]
        if len(set(names)) < len(names):
            fail(f"--adapters {adapters!r} names one twice", code=2)
    return base, tuple(None if name == base else name for name in names)


def _print_run(console: Console, run: "LoadRun", top: int) -> None:
    from lorikeet.cli.load_tables import adapters_table, errors_table, times_table, totals_table

    figures = run.figures
    console.print(times_table(figures, "held by --concurrency", has_client=True))
    console.print(totals_table(figures, run.cpu_share, run.server))
    if top and any(each.adapter is not None for each in figures.adapters):
        console.print(adapters_table(figures.adapters, top))
    if figures.errors:
        console.print(errors_table(figures.errors))


def _print_peak(console: Console, peak: "Peak", runs: "list[LoadRun]", target: float) -> None:
    from lorikeet.cli.load_tables import peak_words, probes_table

    console.print(
        probes_table([(probe.rate, run.figures) for probe, run in zip(peak.probes, runs, strict=True)], target)
    )
    console.print(peak_words(peak))


def _note_doubtful_probes(peak: "Peak", runs: "list[LoadRun]") -> None:
    doubtful = [probe.rate for probe, run in zip(peak.probes, runs, strict=True) if run.is_client_bound]
    if doubtful:
        note(
            f"this client was late or busy from {min(doubtful):.3g} requests/s on: it may have sent fewer, and the "
            "figures of those probes may be its own and not the server's"
        )


def _report(setup: dict[str, Any], runs: "list[LoadRun]", peak: "Peak | None") -> dict[str, Any]:
    """Return the report as JSON data; a search's report omits single requests."""
    if peak is None:
        (run,) = runs
        found = {**run._asdict(), "exchanges": [_described(exchange) for exchange in run.exchanges]}
    else:
        probes = [{**run._asdict(), "exchanges": None} for run in runs]
        found = {"peak_rate": peak.rate, "missed_rate": peak.missed_rate, "probes": probes}
    return {"setup": setup, **found}


def _described(exchange: "RequestResult") -> dict[str, Any]:
    derived = {"ttft_s": exchange.ttft_s, "tpot_s": exchange.tpot_s, "e2e_s": exchange.e2e_s}
    return msgspec.structs.asdict(exchange) | derived
