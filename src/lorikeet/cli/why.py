"""``lorikeet why``: shows the waits of requests, from a log or a server, and the time that each mechanism saved."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.markup import escape
from rich.table import Column, Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.events import Mechanism

BASE = "(base)"


class LoggedDecision(msgspec.Struct, frozen=True):
    """A decision in a line of the log."""

    mechanism: str
    saved_s: float
    why: str
    after_s: float = 0.0


class LoggedRequest(msgspec.Struct, frozen=True):
    """The fields of a line that this command uses. Older logs have no decisions."""

    input_tokens: int
    output_tokens: int
    adapter: str | None = None
    request_id: str = ""
    cached_tokens: int = 0
    queue_s: float | None = None
    waited_for: str = ""
    adapter_wait_s: float = 0.0
    kv_wait_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float | None = None
    finish_reason: str = ""
    chosen: str = ""
    preemptions: int = 0
    saved_s: dict[str, float] = {}
    decisions: tuple[LoggedDecision, ...] = ()

    @property
    def name(self) -> str:
        """Name of the adapter, or of the base model."""
        return self.adapter or BASE

    def parts(self) -> dict[str, float]:
        """Parts of the request's TTFT in seconds; without a first token, its waits."""
        queue_s = self.queue_s or 0.0
        parts = {"queue": queue_s, "adapter": self.adapter_wait_s, "KV": self.kv_wait_s}
        if self.ttft_s is not None:
            parts["prefill"] = max(0.0, self.ttft_s - sum(parts.values()))
        return parts

    def waited_most_for(self) -> str:
        """Description of the largest part of the request's TTFT."""
        parts = self.parts()
        part = max(parts, key=lambda each: parts[each])
        if part == "queue":
            return f"queue: {self.waited_for or 'a step or requests before it'}"
        return {"adapter": "its adapter's transfer", "KV": "its KV's transfer"}.get(part, part)


def why(
    source: Annotated[
        str,
        typer.Argument(
            help="What `lorikeet serve --request-log` wrote, or the id of a recent request of a server or a router.",
            metavar="FILE|ID",
        ),
    ],
    adapter: Annotated[str, typer.Option(help="Only requests for this adapter.", show_default="all")] = "",
    request: Annotated[
        str, typer.Option(help="Only requests whose id begins with this text.", show_default="all")
    ] = "",
    top: Annotated[int, typer.Option(min=0, help="Slowest adapters and requests to show.")] = 10,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Show where the time to the first token went, what each mechanism saved, and why the slowest were slow.

    With an id, show one request as the server knows it; a router shows the backend, too, and why it was that one. Saved
    seconds are estimates of the further wait without the mechanism, from the engine's measured times of steps and
    transfers.
    """
    check_json_file(json_file)
    file = Path(source)
    if _is_id(source):
        _show_request(ServerClient(url, api_key).get(f"/v1/requests/{quote(source, safe='')}"), json_file)
        return
    try:
        found = [each for each in _read(file) if adapter in ("", each.name) and each.request_id.startswith(request)]
    except FileNotFoundError:
        fail(
            f"there is no request log {str(file)!r}. Give the file of `lorikeet serve --request-log`, and --request ID "
            "for one of its requests. Without a log, give the id of a request instead of a file."
        )
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        fail(f"{file}: {error}")
    if not found:
        fail(_none_found(file, adapter, request))
    by_adapter = defaultdict[str, list[LoggedRequest]](list)
    for each in found:
        by_adapter[each.name].append(each)
    figures: dict[str, Any] = {
        "requests": len(found),
        "ttft_s": _parts(found),
        "saved_s": _saved(found),
        "switches": _switches(found),
        "adapters": {name: {"requests": len(of), **_parts(of)} for name, of in _slowest(by_adapter, top)},
        "slowest": [
            {
                "request_id": each.request_id,
                "adapter": each.name,
                "ttft_s": each.ttft_s,
                "most": each.waited_most_for(),
                **({"chosen": each.chosen} if each.chosen else {}),
            }
            for each in _slowest_requests(found, top)
        ],
    }
    if not write_json(json_file, figures):
        return
    console = output()
    console.print(f"{len(found)} requests of {_named(by_adapter)}")
    console.print(_parts_table(found))
    console.print(_saved_table(found))
    for switch in figures["switches"]:
        console.print(escape(switch))
    if top and not request:
        console.print(_adapters_table(_slowest(by_adapter, top)))
    if top:
        console.print(_requests_table(_slowest_requests(found, top)))


def _is_id(source: str) -> bool:
    """Return whether a text is the id of a request: no file has this name, and it does not look like a file's."""
    path = Path(source)
    return not path.exists() and path.name == source and path.suffix not in _LOG_SUFFIXES


_LOG_SUFFIXES = (".jsonl", ".json", ".log", ".txt", ".gz")


def _show_request(answer: dict[str, Any], json_file: str | None) -> None:
    """Print one request: its way through a router, if it is a router's, and its waits at the server."""
    if not write_json(json_file, answer):
        return
    console = output()
    route = answer.get("route")
    if route is not None:
        console.print(_route_table(route))
        for placement in route["placements"]:
            if placement["candidates"]:
                console.print(_candidates_table(placement))
        if not route["known_by_backend"]:
            console.print(f"{route['backend'] or 'No backend'} has no record of this request")
    if sequences := [msgspec.convert(_as_logged(each), LoggedRequest) for each in answer["sequences"]]:
        console.print(_parts_table(sequences))
        console.print(_requests_table(sequences))


def _as_logged(sequence: dict[str, Any]) -> dict[str, Any]:
    """Return a sequence of ``/v1/requests`` with the names of a request log."""
    return {"output_tokens": 0, **sequence, "request_id": sequence["id"]}


def _route_table(route: dict[str, Any]) -> Table:
    ended = f"{route['outcome']} after {route['e2e_s']:.3f} s" if "outcome" in route else "running"
    title = f"{route['id']}: {route['model'] or 'the default model'}, {ended}"
    table = Table(*_columns("after, ms"), "backend", "why", title=escape(title), title_justify="left")
    for each in route["placements"]:
        table.add_row(_ms(each["after_s"]), each["backend"], escape(each["why"]))
    return table


def _candidates_table(placement: dict[str, Any]) -> Table:
    scored_by = placement["scored_by"]
    names = ("requests", "tokens to compute", "has the adapter", *((scored_by,) if scored_by else ()), "avoided")
    table = Table(f"backends after {_ms(placement['after_s'])} ms", *_columns(*names))
    for each in placement["candidates"]:
        cells = [str(each["requests"]), str(each["pending_tokens"]), "yes" if each["has_adapter"] else "no"]
        cells += [f"{each['score']:g}"] if scored_by else []
        table.add_row(each["backend"], *cells, "yes" if each["avoided"] else "")
    return table


def _none_found(file: Path, adapter: str, request: str) -> str:
    """Return the error for a log in which no request fits the options."""
    conditions = [
        *([f"has an id that begins with {request!r}"] if request else []),
        *([f"is for the adapter {adapter!r}"] if adapter else []),
    ]
    return f"no request in {file} {' and '.join(conditions)}" if conditions else f"{file} has no requests"


def _read(file: Path) -> Iterator[LoggedRequest]:
    """Yield the lines of a request log.

    Raises:
        OSError: the log cannot be read.
        msgspec.DecodeError: a line is not a request. The message has the line's number.
    """
    decoder = msgspec.json.Decoder(LoggedRequest)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(f"line {number}: {error}") from error


def _parts(requests: Sequence[LoggedRequest]) -> dict[str, float]:
    """Return the mean of each part of TTFT, and of the whole."""
    answered = [each for each in requests if each.ttft_s is not None] or list(requests)
    parts = [each.parts() for each in answered]
    means = {name: fmean(part.get(name, 0.0) for part in parts) for name in ("queue", "adapter", "KV", "prefill")}
    return {**means, "mean": sum(means.values())}


def _saved(requests: Sequence[LoggedRequest]) -> dict[str, dict[str, float]]:
    """Return the seconds saved and lost and the number of requests, by mechanism."""
    saved = defaultdict[str, float](float)
    lost = defaultdict[str, float](float)
    counts = Counter[str]()
    for each in requests:
        for mechanism, seconds in each.saved_s.items():
            (saved if seconds > 0 else lost)[mechanism] += abs(seconds)
            counts[mechanism] += 1
    return {
        name: {"saved": saved[name], "lost": lost[name], "requests": counts[name]}
        for name in sorted(counts, key=lambda each: lost[each] - saved[each])
    }


def _switches(requests: Sequence[LoggedRequest]) -> list[str]:
    """Return the switches of guarded parts, in words, each with the request before which it happened."""
    return [
        f"before {each.request_id}: {made.why}"
        for each in requests
        for made in each.decisions
        if made.mechanism == Mechanism.GUARD
    ]


def _named(by_adapter: Collection[str]) -> str:
    """Return a text with the number of adapters, and with the base model if it is one of them."""
    count = len(by_adapter) - (BASE in by_adapter)
    adapters = "1 adapter" if count == 1 else f"{count} adapters"
    if BASE not in by_adapter:
        return adapters
    return f"{adapters} and the base model" if count else "the base model"


def _slowest(by_adapter: dict[str, list[LoggedRequest]], top: int) -> list[tuple[str, list[LoggedRequest]]]:
    return sorted(by_adapter.items(), key=lambda item: -_parts(item[1])["mean"])[:top]


def _slowest_requests(requests: Sequence[LoggedRequest], top: int) -> list[LoggedRequest]:
    return sorted(requests, key=lambda each: -(each.ttft_s or each.e2e_s or 0.0))[:top]


def _columns(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"


def _parts_table(requests: Sequence[LoggedRequest]) -> Table:
    table = Table("time to the first token", *_columns("mean, ms", "share"), title_justify="left")
    parts = _parts(requests)
    for name, seconds in parts.items():
        share = seconds / parts["mean"] if parts["mean"] else 0.0
        table.add_row("all" if name == "mean" else name, _ms(seconds), f"{share:.0%}")
    return table


def _saved_table(requests: Sequence[LoggedRequest]) -> Table:
    table = Table("mechanism", *_columns("saved, s", "lost, s", "requests"))
    for mechanism, each in _saved(requests).items():
        shown = (f"{each[part]:.3f}" if each[part] else "–" for part in ("saved", "lost"))
        table.add_row(escape(mechanism), *shown, str(round(each["requests"])))
    return table


def _adapters_table(adapters: Sequence[tuple[str, list[LoggedRequest]]]) -> Table:
    parts = ("queue", "adapter", "KV", "prefill")
    table = Table("slowest adapters", *_columns("requests", "TTFT, ms", *parts, "saved, s"))
    for name, requests in adapters:
        means = _parts(requests)
        saved = sum(sum(each.saved_s.values()) for each in requests)
        shown = (_ms(means[part]) for part in ("mean", *parts))
        table.add_row(escape(name), str(len(requests)), *shown, f"{saved:.3f}")
    return table


def _said(made: LoggedDecision) -> str:
    """Describe a decision, with the time that it saved if known."""
    saved = f" {1e3 * made.saved_s:+.1f} ms" if made.saved_s else ""
    return f"{made.mechanism}{saved}: {made.why}"


def _requests_table(requests: Sequence[LoggedRequest]) -> Table:
    table = Table("slowest requests", "adapter", *_columns("TTFT, ms"), "waited most for", "decisions")
    for each in requests:
        cells = (
            each.request_id,
            each.name,
            _ms(each.ttft_s),
            each.waited_most_for(),
            "\n".join([*([f"auto: {each.chosen}"] if each.chosen else []), *map(_said, each.decisions)]),
        )
        table.add_row(*map(escape, cells))
    return table
