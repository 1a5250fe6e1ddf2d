"""``lorikeet profiles``: lists the cost profiles that come with the package."""

from typing import Annotated

import typer
from rich.table import Column, Table

from lorikeet.cli.console import fail, output

app = typer.Typer(help="List cost profiles of devices and models, or print one.")


@app.callback(invoke_without_command=True)
def list_profiles(context: typer.Context) -> None:
    """List cost profiles of devices and models, or print one."""
    if context.invoked_subcommand is not None:
        return
    from lorikeet.costs.catalog import load_profile, profile_names

    table = Table(Column("name", no_wrap=True), "device", "model", Column("pool GB", justify="right"), "origin")
    for name in profile_names():
        profile = load_profile(name)
        pool = f"{profile.pool_bytes / 1e9:.1f}"
        table.add_row(name, profile.device, profile.model, pool, profile.origin)
    output().print(table)


@app.command("show")
def show_profile(
    name: Annotated[str, typer.Argument(help="A name, optionally with @PAPER, or a .toml file.")],
) -> None:
    """Print a profile as TOML."""
    from lorikeet.costs.catalog import load_profile
    from lorikeet.costs.profile import ProfileError, encode_profile

    try:
        print(encode_profile(load_profile(name)), end="")
    except ProfileError as error:
        fail(str(error))
