"""``lorikeet presets``: lists the systems that a server can run as, one line each."""

from typing import Annotated

import msgspec
import typer
from rich.table import Column, Table

from lorikeet.cli.console import JsonFile, check_json_file, output, write_json
from lorikeet.presets import AUTO_PRESET, PRESETS, PresetGroup


def presets(
    all_: Annotated[bool, typer.Option("--all", help="Also list the presets of papers and of other packages.")] = False,
    json_file: JsonFile = None,
) -> None:
    """List the presets: systems that `serve --preset NAME` can run as.

    Options are changed after the name: `--preset auto,admission=fair`. With --json: every option of every preset.
    """
    check_json_file(json_file)
    if not write_json(json_file, dict(PRESETS)):
        return
    errors: list[str] = []
    groups = PRESETS.groups(lambda error: errors.append(str(error)))
    for group in groups if all_ else groups[:1]:
        table = Table(Column("preset", no_wrap=True), "what it is", title=group.title if all_ else None)
        for name in group.presets:
            table.add_row(name, about(name, group))
        output().print(table)
    if not all_:
        more = sum(len(group.presets) for group in groups[1:])
        output().print(f"`lorikeet presets --all` lists {more} more, which reproduce papers or are of other packages.")
    for error in errors:
        output().print(error)


def about(name: str, group: PresetGroup) -> str:
    """Return one line about a preset; for a variant, the options in which it differs from its family's first preset."""
    if name in group.about:
        return group.about[name]
    system = name.partition(":")[0]
    base = system if system in group.presets else AUTO_PRESET
    own = msgspec.to_builtins(group.presets[name])
    other = msgspec.to_builtins(PRESETS[base])
    changed = ",".join(f"{option}={value}" for option, value in own.items() if value != other[option])
    return f"{base},{changed}" if changed else f"the same as {base}"
