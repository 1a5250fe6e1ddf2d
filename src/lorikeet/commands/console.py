"""What the commands say to people beside their result: notes and errors, on stderr."""

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape


def note(text: str) -> None:
    """Print one line for the user's attention."""
    Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def fail(text: str, code: int = 1) -> NoReturn:
    """Print what went wrong and end the command with ``code``."""
    Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(code)


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the options that were given, and did not get their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, place in sources.items() if place is not None and place.name != "DEFAULT"]
