"""``lorikeet profile``: measures the costs of a model on this machine, and the highest loads that keep an SLO."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lorikeet.cli.console import fail
from lorikeet.config import ConfigError, EngineSettings, ModelSettings, Settings

if TYPE_CHECKING:
    from lorikeet.costs.profile import CostProfile
    from lorikeet.terminal import ProgressDisplay

HOST_MEMORY_BYTES = 2**28
"""Size of the host tier with which copies are measured: far more than any CPU cache."""


def profile(
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Where to write the profile.", show_default="<model>.toml", dir_okay=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: sooner, and less exact.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto (safetensors) or dummy (random weights, for a folder with a config alone).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: one for each core.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a step.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=16, help="Most tokens in a step.")] = 512,
    operating_points: Annotated[
        bool, typer.Option("--operating-points", help="Also find, for each rank, the highest load that keeps --slo.")
    ] = False,
    known: Annotated[
        str, typer.Option("--profile", help="Measure nothing; find them for this profile, a name or a .toml file.")
    ] = "",
    slo: Annotated[str, typer.Option(help="Limits in seconds, such as ttft=10 or ttft=2,tpot=0.1.")] = "",
    preset: Annotated[str, typer.Option(help="Preset for which the loads are found.")] = "auto",
    ranks: Annotated[str, typer.Option(help="Ranks to measure: 8,16,64, or 8-128 for all doublings.")] = "8-128",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of each request.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 128,
) -> None:
    """Measure steps, adapters and transfers on this machine or its GPU, and write their costs to one TOML file.

    Nothing else should run during the measurement. `simulate` and cost-driven policies read the file. Simulations with
    these costs find the operating points, by which a cluster places adapters.
    """
    from lorikeet.cli.profile_table import print_profile
    from lorikeet.core.executor import ExecutorError
    from lorikeet.costs.catalog import load_profile
    from lorikeet.costs.profile import write_profile
    from lorikeet.presets import resolve_preset
    from lorikeet.profiling.driver import ExecutorDriverError
    from lorikeet.simulator.operating_points import (
        BRIEF,
        THOROUGH,
        find_operating_loads,
        search_host_bytes,
        with_operating_loads,
    )
    from lorikeet.terminal import ProgressDisplay
    from lorikeet.workloads.synthetic import parse_ranks
    from lorikeet.workloads.workload import parse_slo

    if output is not None and not output.absolute().parent.is_dir():
        fail(f"--output: there is no folder {output.absolute().parent}", code=2)
    if known and not operating_points:
        fail("--profile: nothing would be measured; it goes with --operating-points", code=2)
    if slo and not operating_points:
        fail("--slo goes with --operating-points", code=2)
    measured = {
        "--model": model,
        "--dtype": dtype != "auto",
        "--load-format": load_format != "auto",
        "--device": device != "cpu",
        "--threads": threads,
    }
    for flag, given in measured.items():
        if known and given:
            fail(f"{flag}: nothing is measured with --profile", code=2)
    if output is not None and output.suffix != ".toml":
        fail(f"--output {str(output)!r}: a profile is a .toml file", code=2)
    if operating_points and not slo:
        fail("--operating-points needs an SLO, for example --slo ttft=10", code=2)
    engine = EngineSettings(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, device=device, threads=threads
    )
    try:
        limits = parse_slo(slo)
        search = msgspec.structs.replace(BRIEF if quick else THOROUGH, ranks=parse_ranks(ranks))
        resolve_preset(preset)
        with ProgressDisplay() as display:
            if known:
                found = load_profile(known)
                path = output or Path(known if known.endswith(".toml") else f"{known}.toml")
            else:
                wanted = ModelSettings(model=model, dtype=dtype, load_format=load_format)
                found, path = _measure(wanted, engine, output, quick, display)
                write_profile(found, path)  # The profile is written now, in case the search fails.
            if operating_points:
                replica = msgspec.structs.replace(
                    engine,
                    preset=preset,
                    num_scheduler_steps=1,
                    host_memory_bytes=search_host_bytes(found.geometry, search),
                )
                lengths = prompt_tokens, output_tokens
                loads = find_operating_loads(found, replica, limits, lengths, search=search, show=display.show)
                found = with_operating_loads(found, loads)
                write_profile(found, path)
    except (ConfigError, ExecutorError, OSError, ExecutorDriverError, ValueError) as error:
        fail(str(error))
    print_profile(found)
    print(f"written to {path}")


def _measure(
    model: ModelSettings, engine: EngineSettings, output: Path | None, quick: bool, display: "ProgressDisplay"
) -> "tuple[CostProfile, Path]":
    """Measure a profile. Return the profile and the file to write."""
    from lorikeet.models.model_folder import prepare_model
    from lorikeet.profiling.run import FULL, QUICK, run_profile

    prepared = prepare_model(model, display.stage)
    name = prepared.identity.rpartition("/")[2]
    path = output or Path(f"{name.lower()}.toml")
    settings = Settings(
        model=msgspec.structs.replace(model, model=str(prepared.path)),
        engine=msgspec.structs.replace(engine, host_memory_bytes=HOST_MEMORY_BYTES, touch_memory=True),
    )
    return run_profile(settings, path.stem, name, QUICK if quick else FULL, display.show), path
