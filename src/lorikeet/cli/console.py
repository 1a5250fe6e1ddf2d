"""Prints tables, notes, errors and JSON reports for all commands, and parses sizes."""

import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``4GiB`` or ``4Gi`` (powers of 1024), ``4GB`` or ``500m`` (of 1000), ``4096``.

    Raises:
        ValueError: the text has none of these forms.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; write for example 4GiB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    return round(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])


JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write JSON there; - prints it, and nothing else.", show_default=False),
]
"""The option ``--json``; :func:`write_json` handles its value."""

STANDARD_OUTPUT = "-"

_NO_TERMINAL_COLUMNS = 1000


def check_json_file(file: str | None) -> None:
    """End the command if the JSON of ``--json`` cannot be written, before the work begins."""
    if file is not None and file != STANDARD_OUTPUT and not Path(file).absolute().parent.is_dir():
        fail(f"--json: folder {str(Path(file).parent)!r} does not exist", code=2)


def check_plot_file(file: Path | None) -> None:
    """End the command if the SVG of ``--plot`` cannot be written, before the work begins."""
    if file is not None and not file.parent.is_dir():
        fail(f"there is no folder {str(file.parent)!r}", code=2)


def write_json(file: str | None, value: Any) -> bool:
    """Write ``value`` as JSON to the target of ``--json``. Without the option, write nothing.

    Returns:
        Whether the command should print its tables, too: False if standard output gets the JSON.
    """
    if file is None:
        return True
    content = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1) + b"\n"
    if file == STANDARD_OUTPUT:
        sys.stdout.write(content.decode())
        return False
    try:
        Path(file).write_bytes(content)
    except OSError as error:
        fail(f"--json {file}: {error.strerror}")
    return True


def output() -> Console:
    """Return a console for tables on standard output. Outside a terminal, cells are not cut or wrapped."""
    columns = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _NO_TERMINAL_COLUMNS
    return Console(highlight=False, emoji=False, width=columns)


def note(text: str, *, as_json: bool = False) -> None:
    """Print a note on stderr, with ``as_json`` as a line of a JSON log."""
    if as_json:
        _print_json("info", "note", note=text)
    else:
        Console(stderr=True, highlight=False, emoji=False).print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def fail(text: str, code: int = 1, *, as_json: bool = False) -> NoReturn:
    """Print an error on stderr, with ``as_json`` as a line of a JSON log, and end the command with ``code``."""
    if as_json:
        _print_json("critical", "the command cannot run", error=text)
    else:
        Console(stderr=True, highlight=False, emoji=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(code)


def _print_json(level: str, event: str, **fields: str) -> None:
    """Print a line in the form of the JSON log, without importing the log's library."""
    line = {**fields, "event": event, "level": level, "timestamp": datetime.now(UTC).isoformat()}
    print(json.dumps(line), file=sys.stderr)


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the options that the user has given."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, place in sources.items() if place is not None and place.name != "DEFAULT"]
