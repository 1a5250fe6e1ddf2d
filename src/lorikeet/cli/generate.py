"""``lorikeet generate``: prints one answer from an engine in this process, without a server."""

from pathlib import Path
from typing import Annotated

import typer

from lorikeet.cli.console import fail
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.request import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer, or with --raw to continue.")],
    model: Annotated[str, typer.Option(help="Local folder or hub id.", show_default="SmolLM2-135M-Instruct")] = "",
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT adapter.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
) -> None:
    """Print one answer, computed in this process; the output is the answer alone."""
    from lorikeet.cli.local_engine import GenerationError, stream_answer

    settings = Settings(
        model=ModelSettings(model=model, dtype=dtype),
        engine=EngineSettings(max_num_seqs=1),
        adapters=AdapterSettings(enabled=adapter is not None),
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    try:
        for piece in stream_answer(settings, prompt, adapter, sampling, raw=raw):
            print(piece, end="", flush=True)
    except GenerationError as error:
        fail(str(error))
    print()
