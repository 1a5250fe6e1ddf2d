"""``lorikeet profile``: measure what this machine and a model cost."""

from pathlib import Path
from typing import Annotated

import typer

from lorikeet.commands.console import fail
from lorikeet.config import ConfigError, EngineSettings, ModelSettings, Settings

HOST_MEMORY_BYTES = 2**28
"""Of the tier that copies are measured with: far more than any cache holds."""


def profile(
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Where to write the profile.", show_default="<model>.toml", dir_okay=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of four, and less exact.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="0: one for each core.")] = 0,
    max_running: Annotated[int, typer.Option(min=1, help="Most sequences in a step.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=16, help="Most tokens in a step.")] = 512,
) -> None:
    """Measure steps, adapters and transfers on this machine, and write their costs to one TOML file.

    Nothing else should run meanwhile. The file is what `simulate` and cost-driven policies read.
    """
    from lorikeet.bench.profiling.rig import RigError
    from lorikeet.bench.profiling.run import FULL, QUICK, run_profile
    from lorikeet.commands.profile_table import print_profile
    from lorikeet.costs.profile import write_profile
    from lorikeet.engine.executor import ExecutorError
    from lorikeet.server.announce import Announcer
    from lorikeet.server.model_folder import prepare_model

    if output is not None and not output.absolute().parent.is_dir():
        fail(f"--output: there is no folder {output.absolute().parent}", code=2)
    try:
        with Announcer() as announcer:
            folder = Path(prepare_model(ModelSettings(model=model), announcer.stage).path)
            path = output or Path(f"{folder.name.lower()}.toml")
            settings = Settings(
                model=ModelSettings(model=str(folder), dtype=dtype),
                engine=EngineSettings(
                    host_memory_bytes=HOST_MEMORY_BYTES,
                    max_running=max_running,
                    max_step_tokens=max_step_tokens,
                    threads=threads,
                ),
            )
            measured = run_profile(settings, path.stem, QUICK if quick else FULL, announcer.show)
        write_profile(measured, path)
    except (ConfigError, ExecutorError, OSError, RigError, ValueError) as error:
        fail(str(error))
    print_profile(measured)
    print(f"written to {path}")
