"""What the commands say to people: notes and errors on stderr, a progress bar while things load."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

Progress = Callable[[str, int, int], None]
"""Called with (stage in words, units done, units in all)."""


def note(text: str) -> None:
    """Print one line for the user's attention on stderr."""
    Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def fail(text: str, code: int = 1) -> NoReturn:
    """Print what went wrong on stderr and end the command with ``code``."""
    Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(code)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show stages of loading as bars on stderr; without a terminal, one line for each stage."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def _plain_progress() -> Progress:
    seen: set[str] = set()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            Console(stderr=True, highlight=False).print(f"{escape(stage)} …", soft_wrap=True)

    return show
