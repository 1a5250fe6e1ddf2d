"""Registers the subcommands of ``lorikeet``."""

import inspect
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from lorikeet import __version__
from lorikeet.cli import adapters, bench, compat, keys, profiles
from lorikeet.cli.art_runtime import art_runtime
from lorikeet.cli.batch import batch, run_batch
from lorikeet.cli.chat import chat
from lorikeet.cli.console import fail, note
from lorikeet.cli.generate import generate
from lorikeet.cli.plan import plan
from lorikeet.cli.presets import presets
from lorikeet.cli.profile import profile
from lorikeet.cli.rank import rank
from lorikeet.cli.replay import replay
from lorikeet.cli.roll import roll
from lorikeet.cli.router import router
from lorikeet.cli.serve import serve
from lorikeet.cli.simulate import simulate
from lorikeet.cli.status import status
from lorikeet.cli.top import top
from lorikeet.cli.train_predictor import train_predictor
from lorikeet.cli.usage import audit, usage
from lorikeet.cli.why import why
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
app.command(context_settings={"allow_extra_args": True})(batch)
app.command("run-batch", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    run_batch
)
app.command()(plan)
app.command()(presets)
app.command()(profile)
app.command()(simulate)
app.command()(replay)
app.command()(rank)
app.command("router")(router)
app.command("route", hidden=True)(router)
app.command("art-runtime")(art_runtime)
app.command()(status)
app.command()(top)
app.command()(roll)
app.command()(train_predictor)
app.command()(usage)
app.command()(audit)
app.command()(why)
app.command()(workload)
app.add_typer(adapters.app, name="adapters")
app.add_typer(bench.app, name="bench")
app.add_typer(keys.app, name="keys")
app.add_typer(profiles.app, name="profiles")


class _Command(TyperCommand):
    """Prints help with each option's full name once, since rich cuts names that do not fit into its table."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with further names of an option after its text."""
        for parameter in self.params:
            others = [*parameter.opts[1:], *parameter.secondary_opts]
            if others and isinstance(parameter, TyperOption):
                parameter.help = f"{parameter.help or ''} Or {', '.join(others)}."
                parameter.opts = parameter.opts[:1]
                parameter.secondary_opts = []
        super().format_help(ctx, formatter)


for _group in (app, adapters.app, bench.app, keys.app, profiles.app):
    for _command in _group.registered_commands:
        _command.cls = _Command
        # The terminal's width decides where lines end, not the docstring.
        _paragraphs = inspect.cleandoc(getattr(_command.callback, "__doc__", None) or "").split("\n\n")
        _command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in _paragraphs)


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
    """Define the options of the command ``lorikeet``."""


def run() -> None:
    """Run the command with the process's arguments, after translating vLLM's and SGLang's flags for ``serve``."""
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
    app(arguments, prog_name="lorikeet")
