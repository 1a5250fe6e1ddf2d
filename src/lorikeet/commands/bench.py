"""``lorikeet bench``: measurements."""

import typer

from lorikeet.commands.bench_limits import bench_limits
from lorikeet.commands.bench_memory import bench_memory
from lorikeet.commands.bench_offline import bench_offline
from lorikeet.commands.bench_serve import bench_serve
from lorikeet.commands.bench_shape import bench_shape

app = typer.Typer(help="Measure.", no_args_is_help=True)

app.command("serve")(bench_serve)
app.command("offline")(bench_offline)
app.command("memory")(bench_memory)
app.command("limits")(bench_limits)
app.command("shape")(bench_shape)
