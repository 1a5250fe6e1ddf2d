"""Builds the tables of ``lorikeet bench serve`` and ``lorikeet simulate``."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from lorikeet.bench.load_report import AdapterResults, ErrorFigures, LoadFigures
from lorikeet.bench.peak import Peak

_KEYS = ("mean", "p50", "p90", "p95", "p99")
_ENDS = ("p50", "p99")


def times_table(figures: LoadFigures, held: str, *, has_client: bool) -> Table:
    """Return a table of a run's distributions, in milliseconds. ``held`` names the delay of requests."""
    table = Table("ms", title="Times", title_justify="left")
    for name in ("mean", "P50", "P90", "P95", "P99", "count"):
        table.add_column(name, justify="right")
    rows = {
        "TTFT": figures.ttft_s,
        "TTFT, cold adapter": figures.cold_ttft_s,
        "TTFT, warm": figures.warm_ttft_s if figures.cold_ttft_s else None,
        "TPOT": figures.tpot_s,
        "ITL": figures.itl_s,
        "E2E": figures.e2e_s,
        "client's lateness": figures.lateness_s if has_client else None,
        held: figures.held_s if figures.held_s and figures.held_s.p99 > 1e-3 else None,
    }
    for name, values in rows.items():
        if values is not None:
            table.add_row(name, *(_ms(getattr(values, key)) for key in _KEYS), str(values.count))
    return table


def totals_table(figures: LoadFigures, cpu_share: float | None, server: Mapping[str, float]) -> Table:
    """Return a table of a run's counts and rates and the server's figures. ``cpu_share`` is the client's."""
    table = Table("figure", title="Run", title_justify="left")
    table.add_column("value", justify="right")
    rows: dict[str, str | None] = {
        "requests, answered whole / sent": f"{figures.completed} / {figures.requests}",
        "answers shorter than requested": str(figures.short_answers) if figures.short_answers else None,
        "duration, s": f"{figures.duration_s:.2f}",
        "requests sent, /s": _number(figures.offered_rate),
        "requests answered, /s": _number(figures.request_rate),
        "output tokens, /s": _number(figures.output_token_rate),
        "all tokens, /s": _number(figures.token_rate),
        "tokens per event": _number(figures.tokens_per_event),
        "SLO attainment": _share(figures.slo_attainment),
        "goodput, requests/s": _number(figures.goodput),
        "fairness over adapters (Jain)": _number(figures.fairness),
        "most requests in flight": str(figures.most_under_way),
        "prompt tokens from cache": _share(figures.cached_share),
        "client, share of a core": None if cpu_share is None else f"{cpu_share:.0%}",
    }
    rows |= {f"server: {name}": _number(value) for name, value in server.items()}
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    return table


def adapters_table(adapters: Sequence[AdapterResults], top: int) -> Table:
    """Return a table of the ``top`` adapters with the most requests."""
    more = f", {top} of {len(adapters)}" if len(adapters) > top else ""
    table = Table("adapter", title=f"Adapters with the most requests, ms{more}", title_justify="left", padding=(0, 0))
    for name in (
        *("requests", "TTFT\ncold", "TTFT\nP50", "TTFT\nP99", "TPOT\nP50", "TPOT\nP99"),
        *("E2E\nP50", "E2E\nP99", "E2E per\ntoken", "SLO"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in adapters[:top]:
        table.add_row(
            "[i]base[/]" if each.adapter is None else escape(each.adapter),
            f"{each.requests}, {each.failed} failed" if each.failed else str(each.requests),
            _ms(each.cold_ttft_s),
            *(_ms(getattr(values, key, None)) for values in (each.ttft_s, each.tpot_s, each.e2e_s) for key in _ENDS),
            _ms(each.normalised_s),
            _share(each.slo_attainment),
        )
    return table


def errors_table(errors: Mapping[str, ErrorFigures]) -> Table:
    """Return a table of the errors, with the count and the first message of each."""
    table = Table("error", "count", "for example", title="Errors", title_justify="left", style="red")
    for kind, figures in errors.items():
        table.add_row(escape(kind), str(figures.count), escape(figures.example))
    return table


def probes_table(probes: Sequence[tuple[float, LoadFigures]], target: float) -> Table:
    """Return a table of the probes of a peak search, in order."""
    table = Table(title="Probes", title_justify="left")
    for name in (
        *("requests\nper s", "sent", "failed", "SLO at-\ntainment", "goodput\nper s", "TTFT\nP99, ms"),
        *("TPOT\nP99, ms", ""),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for rate, figures in probes:
        table.add_row(
            _number(rate),
            str(figures.requests),
            str(figures.requests - figures.completed),
            _share(figures.slo_attainment),
            _number(figures.goodput),
            _ms(getattr(figures.ttft_s, "p99", None)),
            _ms(getattr(figures.tpot_s, "p99", None)),
            "[green]met[/]" if (figures.slo_attainment or 0.0) >= target else "[red]missed[/]",
        )
    return table


def peak_words(peak: Peak) -> str:
    """Return the result of a peak search as a sentence."""
    if peak.rate is None:
        return f"peak load: none; {peak.missed_rate:.3g} requests/s already miss the SLO"
    if peak.missed_rate is None:
        return f"peak load: above {peak.rate:.4g} requests/s, which still meet the SLO"
    return f"peak load: {peak.rate:.4g} requests/s meet the SLO, {peak.missed_rate:.4g} miss it"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.{1 if seconds < 1 else 0}f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"
