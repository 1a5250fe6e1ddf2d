"""``lorikeet bench``: measurements."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lorikeet.commands.bench_serve import bench_serve
from lorikeet.commands.console import fail
from lorikeet.config import ConfigError, ModelSettings, resolve_row

app = typer.Typer(help="Measure.", no_args_is_help=True)

app.command("serve")(bench_serve)


@app.command("offline")
def offline(
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests, all given at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of every answer.")] = 64,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters, ranks 8 to 128 on q, k, v and o.")] = 8,
    peer: Annotated[str, typer.Option(help="peft: measure it too, in turns.")] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Timed runs of each side.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, on both sides.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="Of both sides; 0: one for each core.")] = 0,
    row: Annotated[str, typer.Option(help="Which system to run as.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and adapters.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure throughput with all requests given at once, alone or beside a peer in the same process."""
    from lorikeet.bench.offline import OfflineOptions, run_offline
    from lorikeet.kernels.base import torch_dtype
    from lorikeet.models.checkpoint import ModelConfigError
    from lorikeet.models.loading import WeightError
    from lorikeet.server.announce import Announcer
    from lorikeet.server.model_folder import prepare_model

    if peer not in ("", "peft"):
        fail(f"peer {peer!r} is not one of: peft", code=2)
    try:
        resolve_row(row)
        torch_dtype(dtype)
    except ValueError as error:
        fail(str(error), code=2)
    try:
        with Announcer() as announcer:
            options = OfflineOptions(
                model=str(prepare_model(ModelSettings(model=model), announcer.stage).path),
                requests=requests,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                adapters=adapters,
                peer=peer,
                pairs=pairs,
                dtype=dtype,
                threads=threads or len(os.sched_getaffinity(0)),
                row=row,
                seed=seed,
            )
            report = run_offline(options, announcer.show)
    except (ConfigError, ModelConfigError, WeightError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(report))
        return
    table = Table("figure", "value")
    for name, value in report.items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.2f}")
    Console().print(table)
