"""``lorikeet bench shape``: a published model's sizes, without its weights."""

from pathlib import Path
from typing import Annotated

import typer

from lorikeet.bench.model_shapes import MODEL_SHAPES, write_model_shape
from lorikeet.commands.console import fail


def bench_shape(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODEL_SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Made if it is missing.")],
) -> None:
    """Write the config of a published model into a folder, to be a ``--model`` with ``--load-format dummy``."""
    if (folder / "config.json").exists():
        fail(f"{folder}: there is a model already", code=2)
    try:
        print(write_model_shape(folder, name))
    except ValueError as error:
        fail(str(error), code=2)
    except OSError as error:
        fail(str(error))
