"""What ``serve`` prints for the person who started it: progress while things load, then how to use the server."""

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_SHOWN_ADAPTERS = 20


def fail(text: str) -> NoReturn:
    """Print why the server cannot run and end the process with code 1."""
    _print_error(text)
    raise SystemExit(1)


def give_up(text: str) -> NoReturn:
    """Do the same at once: threads of libraries, which Python would wait for, may be downloading for an hour yet."""
    _print_error(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _print_error(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)


def shown_url(host: str, port: int) -> str:
    """Return the address under which a server on this machine can be opened that listens on ``host``."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


class Announcer:
    """Bars on a terminal; elsewhere one line for each stage. All on stderr, the final lines on stdout."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not sys.stderr.isatty())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, name: str) -> None:
        """Show a stage whose length is not known."""
        self.show(name, 0, 0)

    def show(self, stage: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` units of a stage; 0 of 0 for one whose length is not known."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(escape(stage), total=total or None)
            if self._bars.disable:
                self._console.print(f"{escape(stage)} …", soft_wrap=True)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def ready(self, url: str, base: str, adapters: Sequence[str], *, asks_for_key: bool) -> None:
        """End the bars; print the URL, the models and a line to paste."""
        self._bars.stop()
        more = len(adapters) - _SHOWN_ADAPTERS
        shown = ", ".join(adapters[:_SHOWN_ADAPTERS]) + (f" and {more} more" if more > 0 else "")
        model = adapters[0] if adapters else base
        console = Console(highlight=False)
        console.print(f"[bold green]Lorikeet is ready:[/] {url}", soft_wrap=True)
        console.print(f"  base model: {escape(base)}", soft_wrap=True)
        console.print(f"  adapters:   {escape(shown) or 'none'}", soft_wrap=True)
        console.print("Try:", soft_wrap=True)
        key = '-H "Authorization: Bearer $LORIKEET_API_KEY" ' if asks_for_key else ""
        console.print(
            f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
            f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a lorikeet?"}}]}}\'',
            soft_wrap=True,
            markup=False,
        )
