"""The command ``lorikeet`` and its subcommands."""

import sys
from typing import Annotated

import typer

from lorikeet import __version__
from lorikeet.cli import adapters, bench, compat, profiles
from lorikeet.cli.chat import chat
from lorikeet.cli.console import fail, note
from lorikeet.cli.generate import generate
from lorikeet.cli.profile import profile
from lorikeet.cli.replay import replay
from lorikeet.cli.router import router
from lorikeet.cli.serve import serve
from lorikeet.cli.simulate import simulate
from lorikeet.cli.status import status
from lorikeet.cli.train_predictor import train_predictor
from lorikeet.cli.workload import workload

app = typer.Typer(
    name="lorikeet",
    help="Serve many LoRA adapters over one base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(profile)
app.command()(simulate)
app.command()(replay)
app.command("router")(router)
app.command("route", hidden=True)(router)
app.command()(status)
app.command()(train_predictor)
app.command()(workload)
app.add_typer(adapters.app, name="adapters")
app.add_typer(bench.app, name="bench")
app.add_typer(profiles.app, name="profiles")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lorikeet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Run the command with the process's arguments; those of ``serve`` are first translated from vLLM and SGLang."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        as_json = "--log-json" in arguments
        try:
            translated, notes = compat.translate(arguments[1:])
        except compat.CompatError as error:
            fail(str(error), code=2, as_json=as_json)
        for text in notes:
            note(text, as_json=as_json)
        arguments = ["serve", *translated]
    app(arguments)
