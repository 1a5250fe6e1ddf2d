"""Defines ``lorikeet bench``: ``limits`` and ``shape`` are here, ``serve`` is in ``bench_serve.py``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lorikeet.cli.bench_serve import bench_serve
from lorikeet.cli.console import JsonFile, check_json_file, fail, output, write_json
from lorikeet.config import ConfigError, ModelSettings
from lorikeet.core.machine import usable_cores
from lorikeet.profiling.model_shapes import MODEL_SHAPES, write_model_shape


def bench_limits(
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="0: one for each core.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure memory bandwidth and matrix multiplication, and print the speed limits that they set for a model."""
    import torch

    from lorikeet.kernels.devices import torch_dtype
    from lorikeet.models.config import read_model_config
    from lorikeet.models.json_section import ModelConfigError
    from lorikeet.models.model_folder import prepare_model
    from lorikeet.profiling.machine_limits import LimitMeter, decode_limit_tok_s, model_cost, prefill_limit_tok_s
    from lorikeet.terminal import ProgressDisplay

    check_json_file(json_file)
    try:
        kind = torch_dtype(dtype)
    except ValueError as error:
        fail(str(error), code=2)
    try:
        with ProgressDisplay() as display:
            folder = Path(prepare_model(ModelSettings(model=model), display.stage).path)
        cost = model_cost(read_model_config(folder), kind.itemsize)
    except (ConfigError, ModelConfigError) as error:
        fail(str(error))
    torch.set_num_threads(threads or len(usable_cores()))
    limits = LimitMeter(kind).measure()
    report = {
        "model": folder.name,
        "dtype": dtype,
        "threads": limits.threads,
        "read_gb_s": limits.read_gb_s,
        "gemm_gflops": limits.gemm_gflops,
        "decode_tok_s": {rows: decode_limit_tok_s(cost, limits, rows) for rows in limits.gemm_gflops},
        "prefill_tok_s": prefill_limit_tok_s(cost, limits),
    }
    if write_json(json_file, report):
        _print(report)


def _print(report: dict[str, Any]) -> None:
    console = output()
    console.print(f"{report['model']}, {report['dtype']}, {report['threads']} threads", soft_wrap=True)
    table = Table()
    for heading in ("rows", "GFLOP/s", "decode tok/s at most"):
        table.add_column(heading, justify="right")
    for rows, rate in report["gemm_gflops"].items():
        table.add_row(str(rows), f"{rate:.1f}", f"{report['decode_tok_s'][rows]:.1f}")
    console.print(table)
    console.print(f"memory read: {report['read_gb_s']:.1f} GB/s (bounds the decode of one row)")
    console.print(f"prefill: {report['prefill_tok_s']:.0f} tok/s at most")


def bench_shape(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODEL_SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Created if it is missing.")],
) -> None:
    """Write the config of a published model into a folder, to be a --model with --load-format dummy."""
    if (folder / "config.json").exists():
        fail(f"{folder}: there is a model already", code=2)
    try:
        print(write_model_shape(folder, name))
    except ValueError as error:
        fail(str(error), code=2)
    except OSError as error:
        fail(str(error))


app = typer.Typer(help="Run benchmarks.", no_args_is_help=True)

app.command("serve")(bench_serve)
app.command("limits")(bench_limits)
app.command("shape")(bench_shape)
