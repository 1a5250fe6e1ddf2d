"""``lorikeet rank``: runs a rank of another machine's engine on this machine."""

from typing import Annotated

import typer

from lorikeet.cli.console import fail


def rank(
    address: Annotated[str, typer.Argument(help="The engine's --rank-address.", metavar="HOST:PORT")],
    rank_key_file: Annotated[str, typer.Option(help="File with the key that the engine has.", metavar="FILE")],
    model: Annotated[
        str, typer.Option(help="The model's folder on this machine, if it is not that of the engine.", metavar="FOLDER")
    ] = "",
    log_level: Annotated[str, typer.Option(help="Least severe level of the log.")] = "info",
) -> None:
    """Run one rank of an engine on another machine, and join the engine again after each restart.

    The engine is lorikeet serve with --tensor-parallel-size or --pipeline-parallel-size, and --rank-address.
    """
    from lorikeet.core.logs import configure_logs
    from lorikeet.worker.remote_ranks import RemoteRankError, follow_engine
    from lorikeet.worker.tensor_parallel import run_rank

    try:
        configure_logs(log_level, as_json=False)
        follow_engine(run_rank, address, rank_key_file, model, log_level)
    except (RemoteRankError, ValueError) as error:
        fail(str(error), code=2)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
