"""``lorikeet replay``: runs a recording of ``serve --record`` again, on a virtual clock."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, output, write_json

if TYPE_CHECKING:
    from lorikeet.engine.recording import Recording
    from lorikeet.engine.replay import Difference

MOST_ROWS = 60
"""Most rows in the table of two plans that differ."""


def replay(
    file: Annotated[Path, typer.Argument(help="What `lorikeet serve --record` wrote.")],
    profile: Annotated[
        str, typer.Option(help="Instead compare step times: name or file of a profile.", show_default="")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Run a recording again with its recorded times, and check that every plan is the same.

    With --profile, the recorded times of steps and transfers are compared with modelled ones, without running anything.
    """
    check_json_file(json_file)
    from lorikeet.config import ConfigError
    from lorikeet.costs.profile import ProfileError
    from lorikeet.engine.recording import Recording, RecordingError

    try:
        recording = Recording(file)
        if profile:
            _compare(recording, profile, json_file)
        else:
            _replay(recording, json_file)
    except (ConfigError, ProfileError, RecordingError) as error:
        fail(str(error))


def _replay(recording: "Recording", json_file: str | None) -> None:
    from lorikeet.engine.replay import replay as run

    header = recording.header
    found = run(recording)
    identical = found.difference is None
    shown = {"preset": header.engine.preset, "plans": found.plans, "steps": found.steps, "seconds": found.seconds}
    if not write_json(json_file, {**shown, "identical": identical}):
        raise typer.Exit(0 if identical else 1)
    console = output()
    blocks = f"{header.sizes.total_blocks} device and {header.sizes.host_blocks} host blocks"
    console.print(f"preset {header.engine.preset}, {blocks}, Lorikeet {header.version}")
    seconds = f"{found.steps} steps, {found.seconds:.1f} s"
    if found.difference is None:
        console.print(f"{found.plans} plans identical ({seconds})")
        return
    console.print(f"after {found.plans} identical plans ({seconds}) one differs:")
    _show(console, found.difference)
    raise typer.Exit(1)


def _show(console: Console, difference: "Difference") -> None:
    from lorikeet.engine.replay import plan_fields

    if difference.problem:
        console.print(f"the replay failed: {escape(difference.problem)}")
    if difference.replayed is None:
        console.print(f"recorded: {difference.recorded}", markup=False)
        return
    table = Table(Column("field", no_wrap=True), "recorded", "replayed")
    for field in islice(plan_fields(difference.recorded, difference.replayed), MOST_ROWS):
        style = "bold red" if field.differs else None
        name = f"≠ {field.name}" if field.differs else f"  {field.name}"
        table.add_row(escape(name), escape(field.recorded), escape(field.replayed), style=style)
    console.print(table)


def _compare(recording: "Recording", name: str, json_file: str | None) -> None:
    from statistics import median

    import numpy as np

    from lorikeet.costs.catalog import load_profile
    from lorikeet.engine.replay import compare_times, turns
    from lorikeet.presets import resolve_preset
    from lorikeet.worker.modelled import transfer_model

    profile = load_profile(name)
    if profile.geometry.sizes != recording.header.sizes.geometry.sizes:
        fail(f"profile {profile.name} is of {profile.model}; the recording is of another model")
    _, preset = resolve_preset(recording.header.engine.preset)
    figures: dict[str, dict[str, float]] = {}
    for kind, pairs in compare_times(
        turns(recording), preset, transfer_model(recording.header.engine, profile)
    ).items():
        if pairs:
            errors = [abs(modelled - recorded) / recorded for recorded, modelled in pairs]
            recorded_s, modelled_s = (median(side) for side in zip(*pairs, strict=True))
            figures[kind] = {
                "count": len(pairs),
                "recorded_s": recorded_s,
                "modelled_s": modelled_s,
                "error": median(errors),
                "p95_error": float(np.quantile(errors, 0.95)),
            }
    if not write_json(json_file, {"profile": profile.name, "times": figures}):
        return
    right = [Column(text, justify="right") for text in ("count", "recorded ms", "modelled ms", "error", "P95")]
    table = Table("kind", *right, caption=f"medians; errors relative to the recorded time; profile {profile.name}")
    for kind_name, each in figures.items():
        milliseconds = (f"{1e3 * each[side]:.2f}" for side in ("recorded_s", "modelled_s"))
        table.add_row(kind_name, str(each["count"]), *milliseconds, f"{each['error']:.1%}", f"{each['p95_error']:.1%}")
    output().print(table)
