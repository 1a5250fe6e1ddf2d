"""Shows progress, fatal errors and the ready message of commands on a terminal."""

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, Self

import structlog
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

log: structlog.stdlib.BoundLogger = structlog.get_logger("lorikeet.api")

_SHOWN_ADAPTERS = 20


class ProgressDisplay:
    """Shows progress on stderr: bars on a terminal, otherwise a line for each stage.

    Args:
        bars: whether to draw bars on a terminal.
        lines: whether to print a line at the begin of each stage without bars.
    """

    def __init__(self, *, bars: bool = True, lines: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)
        self._lines = lines
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not (bars and sys.stderr.isatty()))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the bars."""
        self._bars.stop()

    def stage(self, name: str) -> None:
        """Show a stage of unknown length."""
        self.show(name, 0, 0)

    def show(self, stage: str, done: int, total: int, left_s: float | None = None) -> None:
        """Show ``done`` of ``total`` units of a stage; 0 of 0 for a stage of unknown length.

        Args:
            stage: name of the stage.
            done, total: number of units.
            left_s: estimated seconds until the end; None if unknown.
        """
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(escape(stage), total=total or None)
            if self._bars.disable and self._lines:
                self._console.print(f"{escape(stage)} …", soft_wrap=True)
        left = "" if left_s is None else f", about {left_s:.0f} s left"
        described = escape(f"{stage}{left}")
        self._bars.update(self._tasks[stage], completed=done, total=total or None, description=described)


def show_ready(
    url: str, base: str, adapters: Sequence[str], *, needs_key: bool, as_json: bool, chats: bool = True
) -> None:
    """Announce a ready server: print its URL, models and a command to paste on stdout, or log one JSON line.

    Args:
        url: the server's address.
        base: name of the base model.
        adapters: names of all adapters; the first 20 are shown.
        needs_key: whether the command to paste sends an API key.
        as_json: whether to log a JSON line instead of printing.
        chats: whether the command's model has a chat template.
    """
    if as_json:
        log.info("ready", url=url, base_model=base, adapters=len(adapters))
        return
    more = len(adapters) - _SHOWN_ADAPTERS
    shown = ", ".join(adapters[:_SHOWN_ADAPTERS]) + (f" and {more} more" if more > 0 else "")
    model = adapters[0] if adapters else base
    console = Console(highlight=False, emoji=False)
    console.print(f"[bold green]Lorikeet is ready:[/] {url}", soft_wrap=True)
    console.print(f"  base model: {escape(base)}", soft_wrap=True)
    console.print(f"  adapters:   {escape(shown) or 'none'}", soft_wrap=True)
    console.print("Try:", soft_wrap=True)
    key = '-H "Authorization: Bearer $LORIKEET_API_KEY" ' if needs_key else ""
    if url.startswith("unix:"):
        url = f"--unix-socket {url.removeprefix('unix:')} http://localhost"
    route = "completions"
    prompt = '"prompt": "A lorikeet is", "max_tokens": 32'
    if chats:
        route = "chat/completions"
        prompt = '"messages": [{"role": "user", "content": "What is a lorikeet?"}]'
    console.print(
        f"curl {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{{\"model\": \"{model}\", {prompt}}}'",
        soft_wrap=True,
        markup=False,
    )


def shown_url(host: str, port: int, has_tls: bool = False) -> str:
    """Return the URL at which this machine reaches a server that listens on ``host``."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if has_tls else 'http'}://{shown}:{port}"


def fail(text: str, *, as_json: bool = False) -> NoReturn:
    """Report why the server cannot run, and end the process with code 1."""
    if as_json:
        log.critical("the server cannot run", error=text)
    else:
        Console(stderr=True, highlight=False, emoji=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(1)


def exit_at_once() -> NoReturn:
    """End the process with code 0 without waiting for threads, since a library's thread may download for an hour."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
