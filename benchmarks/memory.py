"""Compares presets' memory management on one workload, on engines in this process.

``python -m benchmarks.memory --help`` lists the options.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from benchmarks.memory_bench import MemorySetting, live_rig, modelled_rig, preset_figures, run_preset
from benchmarks.memory_work import MemoryWork, WorkingSet, WorkOptions, least_memory_bytes, make_work, working_set
from benchmarks.plots import pool_areas
from lorikeet.cli.console import JsonFile, check_json_file, check_plot_file, fail, output, parse_size, write_json
from lorikeet.config import ModelSettings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.machine import usable_cores
from lorikeet.core.text import format_size
from lorikeet.costs.catalog import load_profile
from lorikeet.models.model_folder import prepare_model
from lorikeet.plugins import split_options
from lorikeet.presets import resolve_preset
from lorikeet.terminal import ProgressDisplay
from lorikeet.workloads.synthetic import parse_modules, parse_ranks

_PRESETS = "elora,elora:s-lora,vllm-static,vllm-static:discard"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def memory_command(
    workload: Annotated[
        str,
        typer.Argument(
            help="A workload, Mooncake's JSONL or Azure's CSV; or conversations, chatbot, agent or translation."
        ),
    ],
    adapters: Annotated[int, typer.Option(min=0, help="How many there are, with random weights.")] = 100,
    requests: Annotated[
        int | None, typer.Option(min=1, help="At least so many, whole conversations.", show_default="all, or 240")
    ] = None,
    presets: Annotated[
        str, typer.Option(help="Presets, separated by commas; options may follow: vllm-static,adapter_share=0.35.")
    ] = _PRESETS,
    ranks: Annotated[str, typer.Option(help="Of the adapters in turn: 32, 32,64 or 8-128.")] = "32,64",
    modules: Annotated[str, typer.Option(help="That the adapters change.")] = "q,k,v,o",
    adapter_choice: Annotated[
        str, typer.Option(help="Used if the workload names no adapters: see docs/workloads.md.")
    ] = "zipf:1",
    rate: Annotated[
        float | None, typer.Option(help="Requests per second on average.", show_default="the file's own times, or 1")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Device pool, such as 512MiB.", show_default="a quarter of all that the workload fills")
    ] = "",
    host_memory: Annotated[
        str, typer.Option(help="Host pool; 0 for none.", show_default="room for all adapters and all KV")
    ] = "",
    link_gb_per_s: Annotated[
        float, typer.Option(min=0.0, help="Declared speed of the link between them, each way; 0: as fast as it is.")
    ] = 0.0,
    executor: Annotated[str, typer.Option(help="torch, or modelled: a virtual clock, by --profile.")] = "torch",
    profile: Annotated[str, typer.Option(help="Name or .toml file, for --executor modelled.")] = "",
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="0: one for each core.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that hold blocks at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.")] = 512,
    length_scale: Annotated[
        float | None, typer.Option(help="Factor on the lengths of a file.", show_default="1/32 of Mooncake's, else 1")
    ] = None,
    prefix_block_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Of a prefix block, before scaling.", show_default="what the file says"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random choices.")] = 0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write what fills the device over time, as SVG.", dir_okay=False)
    ] = None,
) -> None:
    """Run one workload with several presets, one after the other, and compare their memory management.

    Requests arrive in this process, so no client competes for the cores. A turn of a conversation waits for the earlier
    answers, and its prompt contains these answers as they were generated.
    """
    check_json_file(json_file)
    if executor not in ("torch", "modelled"):
        fail(f"--executor {executor!r} is neither torch nor modelled", code=2)
    if bool(profile) != (executor == "modelled"):
        fail("--profile and --executor modelled go together", code=2)
    if executor == "modelled":
        for flag, given in (("--model", model), ("--dtype", dtype != "auto"), ("--threads", threads)):
            if given:
                fail(f"{flag}: without effect here, the profile decides it", code=2)
    check_plot_file(plot)
    for flag, number in (("--rate", rate), ("--length-scale", length_scale)):
        if number is not None and not number > 0:
            fail(f"{flag} {number:g} is not positive", code=2)
    try:
        changed = parse_modules(modules)
    except ValueError as error:
        fail(f"--{error}", code=2)
    try:
        names = split_presets(presets)
        for name in names:
            resolve_preset(name)
        options = WorkOptions(
            source=workload,
            requests=requests,
            rate=rate,
            adapters=adapters,
            ranks=parse_ranks(ranks),
            modules=changed,
            adapter_choice=adapter_choice,
            length_scale=length_scale,
            prefix_block_tokens=prefix_block_tokens,
            seed=seed,
        )
        given_bytes = parse_size(memory) if memory else None
        if given_bytes == 0:
            fail("--memory 0: the pool must hold at least one request", code=2)
        given_host_bytes = parse_size(host_memory) if host_memory else None
    except ValueError as error:
        fail(str(error), code=2)
    try:
        with ProgressDisplay() as display, tempfile.TemporaryDirectory(prefix="lorikeet-memory-") as folder:
            work = make_work(options)
            if executor == "torch":
                path = prepare_model(ModelSettings(model=model), display.stage).path
                display.stage(f"writing {adapters} adapters")
                rig = live_rig(path, dtype, work, options, Path(folder))
            else:
                path = Path()
                rig = modelled_rig(load_profile(profile), work, options)
            setting = MemorySetting(
                memory_bytes=1,
                host_memory_bytes=0,
                link_bytes_per_s=link_gb_per_s * 1e9,
                model=str(path),
                dtype=dtype,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=work.longest_tokens,
                threads=threads or len(usable_cores()),
            )
            filled = working_set(work, rig.adapters, rig.geometry, setting.block_size)
            least_bytes = least_memory_bytes(work, rig.adapters, rig.geometry, setting.block_size)
            setting = msgspec.structs.replace(
                setting,
                memory_bytes=given_bytes or max(filled.total_bytes // 4, least_bytes),
                host_memory_bytes=filled.host_bytes if given_host_bytes is None else given_host_bytes,
            )
            runs = {
                name: run_preset(
                    rig,
                    setting.settings(name),
                    work,
                    on_finished=lambda done, name=name: display.show(name, done, len(work.requests)),  # type: ignore[misc]
                )
                for name in names
            }
    except (OSError, ValueError) as error:
        fail(str(error), code=2)
    except ExecutorError as error:
        fail(str(error))
    results = [preset_figures(name, run) for name, run in runs.items()]
    title = _title(work, setting, filled, profile)
    if plot is not None:
        panels = [(name, run.samples) for name, run in runs.items()]
        plot.write_text(pool_areas(title, panels), encoding="utf-8")
    setup = {
        "workload": options,
        "setting": setting,
        "working_set": filled._asdict(),
        "executor": executor,
        "profile": profile or None,
    }
    if write_json(json_file, {"results": results, "setup": setup}):
        _print(title, results)


def split_presets(text: str) -> list[str]:
    """Return the presets of a comma-separated list. Parts with ``=`` are options of the preset before them.

    Raises:
        ValueError: the list is empty, a preset is named twice, or an option precedes the first preset.
    """
    names: list[str] = []
    for part in filter(None, split_options(text)):
        if "=" not in part:
            names.append(part)
        elif names:
            names[-1] += f",{part}"
        else:
            raise ValueError(f"--presets: {part!r} comes before any preset")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--presets {text!r}: name presets, each once")
    return names


def _title(work: MemoryWork, setting: MemorySetting, filled: WorkingSet, profile: str) -> str:
    link = f"{setting.link_bytes_per_s / 1e9:g} GB/s" if setting.link_bytes_per_s else "as fast as it is"
    by = f"modelled by {profile}" if profile else "live"
    return (
        f"{len(work.requests)} requests, {len(work.names)} adapters; they fill {format_size(filled.total_bytes)} "
        f"({format_size(filled.adapter_bytes)} adapters); device {format_size(setting.memory_bytes)}, "
        f"host {format_size(setting.host_memory_bytes)}, link {link}; {by}"
    )


def _print(title: str, results: Sequence[dict[str, Any]]) -> None:
    console = output()
    console.print(escape(title), soft_wrap=True)
    for name, columns in _TABLES.items():
        table = Table("preset", title=name, title_justify="left")
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in results:
            table.add_row(escape(row["preset"]), *(cell(row) for cell in columns.values()))
        console.print(table)
    for row in results:
        for kind, example in row["errors"].items():
            console.print(f"[red]{escape(row['preset'])}: {escape(kind)}:[/] {escape(example)}", soft_wrap=True)


def _part(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _ms((row["ttft_parts_s"] or {}).get(name))


def _moved(target: str) -> Callable[[dict[str, Any]], str]:
    """Return a column with the MiB transferred to a tier."""
    return lambda row: f"{sum(t['bytes'] for r, t in row['transfers'].items() if r.endswith(target)) / 2**20:,.0f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.{1 if seconds < 1 else 0}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


_TABLES: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "Times, ms": {
        "TTFT": lambda row: _ms(row["ttft_mean_s"]),
        "P95": lambda row: _ms(row["ttft_p95_s"]),
        "TPOT": lambda row: _ms(row["tpot_mean_s"]),
        "held": lambda row: _ms(row["held_mean_s"]),
        "failed": lambda row: str(row["requests"] - row["completed"]),
        "preempted": lambda row: str(row["preemptions"]),
    },
    "Parts of TTFT, ms": {
        "queue": _part("queue_s"),
        "adapter": _part("adapter_cold_s"),
        "KV": _part("kv_cold_s"),
        "prefill": _part("prefill_s"),
    },
    "Memory": {
        "adapter hits": lambda row: _share(row["adapter_hit_rate"]),
        "KV hits": lambda row: _share(row["kv_hit_rate"]),
        "on host": lambda row: _share(row["kv_host_hit_rate"]),
        "invalid KV": lambda row: _share(row["invalid_kv_share"]),
    },
    "Transfers": {
        "in, MiB": _moved("-device"),
        "out, MiB": _moved("device-host"),
        "of link": lambda row: _share(row["transfers"].get("host-device", {}).get("link_use")),
        "prefetches used": lambda row: _share(row["prefetch_accuracy"]),
        "decision, ms": lambda row: _ms(row["decision_mean_s"]),
    },
}
"""By title of the table: its columns, each with a function that returns the cell."""


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.memory")
