"""``lorikeet train-predictor``: trains a predictor of answer lengths on request logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lorikeet.cli.console import fail, output
from lorikeet.config import ConfigError, ModelSettings
from lorikeet.core.machine import usable_cores
from lorikeet.core.text import install_command

if TYPE_CHECKING:
    from lorikeet.scheduling.prediction.learned import LengthModelInfo


def train_predictor(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Request logs with prompts (--request-log-text), the oldest first.", dir_okay=False),
    ],
    output: Annotated[Path, typer.Option(help="File to write the predictor to.", dir_okay=False)],
    model: Annotated[
        str, typer.Option(help="Local folder or hub id of the model served.", show_default="SmolLM2-135M-Instruct")
    ] = "",
) -> None:
    """Train a predictor of answer lengths on logged requests, for `serve --length-predictor-file`.

    The last fifth of the requests is held out first, to compare with predictions from the history of each adapter.
    """
    if not output.absolute().parent.is_dir():
        fail(f"--output: there is no folder {output.absolute().parent}", code=2)
    try:
        from lorikeet.engine.length_predictor_training import read_logs, train_from_logs
        from lorikeet.scheduling.prediction.sentence_model import SentenceModelError
    except ModuleNotFoundError as error:
        if error.name != "sklearn":
            raise
        fail(f"learning needs scikit-learn: run `{install_command('predictor')}`")
    from lorikeet.models.model_folder import prepare_model
    from lorikeet.terminal import ProgressDisplay

    try:
        requests = read_logs(logs)
        with ProgressDisplay() as display:
            folder = Path(prepare_model(ModelSettings(model=model), display.stage).path)
            head = train_from_logs(
                requests,
                folder / "tokenizer.json",
                len(usable_cores()),
                lambda done: display.show("prompts", done, len(requests)),
            )
        head.write(output)
    except (ConfigError, OSError, SentenceModelError, ValueError) as error:
        fail(str(error))
    _print(head.about)
    print(f"written to {output}")


def _print(about: "LengthModelInfo") -> None:
    table = Table(title=f"{about.learned.requests} requests held out of {about.requests}", title_justify="left")
    for name in ("predicted by", "mean error, tokens", "median error, share", "in the true quintile"):
        table.add_column(name, justify="left" if name == "predicted by" else "right")
    for name, errors in (("the learned model", about.learned), ("history", about.history)):
        table.add_row(name, f"{errors.mean_tokens:.1f}", f"{errors.median_share:.0%}", f"{errors.in_quintile:.0%}")
    console = output()
    console.print(table)
    better = "the learned model" if about.is_better else "history"
    console.print(f"--length-predictor auto uses {better}: its mean error is the smaller one")
