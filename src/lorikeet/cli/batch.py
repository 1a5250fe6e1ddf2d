"""``lorikeet batch``: answers a file of requests with a running server, or with a server that it starts."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from lorikeet.cli.console import fail, note
from lorikeet.cli.http_client import ApiKey

_CONCURRENCY = 64
_SERVE = "from lorikeet.cli.main import main; main()"
_LOOK_S = 0.1
_INTERRUPTED = 130

Target = Annotated[
    Path,
    typer.Option("--output", "-o", "--output-file", help="Where answers are appended, one a line.", dir_okay=False),
]
Model = Annotated[
    str, typer.Option(help="Model of the server to start: folder or hub id.", show_default="SmolLM2-135M-Instruct")
]
ServerUrl = Annotated[
    str, typer.Option(help="A running server; without one, a server is started.", envvar="LORIKEET_URL")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at the same time.")]


def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Requests, one a line, as OpenAI's batches have them.")
    ],
    output: Target,
    url: ServerUrl = "",
    api_key: ApiKey = None,
    model: Model = "",
    concurrency: Concurrency = _CONCURRENCY,
) -> None:
    """Answer a file of requests over the base model and any adapters.

    Each line is {"custom_id", "url", "body"}. The requests run when no other request waits. Run the same command again
    to continue after an interruption: answers in OUTPUT are not computed again. Without --url, the command starts a
    server, with the flags of `lorikeet serve` after --, such as -- --adapter-dir DIR.
    """
    _run(source, output, url, api_key, model, concurrency, context.args)


def run_batch(
    context: typer.Context,
    source: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one a line.")],
    output: Target,
    url: ServerUrl = "",
    api_key: ApiKey = None,
    model: Model = "",
    concurrency: Concurrency = _CONCURRENCY,
) -> None:
    """Answer a file of requests as `vllm run-batch` does; other options are `lorikeet serve`'s."""
    _run(source, output, url, api_key, model, concurrency, context.args)


def _run(
    source: Path, output: Path, url: str, api_key: str | None, model: str, concurrency: int, flags: Sequence[str]
) -> None:
    from lorikeet.cli.batch_sender import BatchCounts, BatchError, BatchFiles, send_batch
    from lorikeet.serving.batches.lines import LineError
    from lorikeet.terminal import ProgressDisplay

    if url and (flags or model):
        fail(
            f"{'--model' if model else flags[0]} is for a server that is started, and --url names one that runs", code=2
        )
    try:
        files = BatchFiles(source, output)
    except LineError as error:
        fail(f"{source}: {error}", code=2)
    except (BatchError, OSError) as error:
        fail(str(error), code=2)
    first = counts = files.counts
    if first.done == first.total:
        note(f"all {first.total} requests have answers in {output}")
        return
    if first.done:
        note(f"{first.done} of {first.total} requests have answers; going on with the others")
    began_s = time.monotonic()

    async def send(display: ProgressDisplay) -> None:
        nonlocal began_s
        if (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

        def show(now: BatchCounts) -> None:
            nonlocal counts
            counts = now
            display.show("requests", now.done, now.total)

        if url:
            show(counts)
            await send_batch(files, url, api_key, concurrency, show)
            return
        display.stage("starting the server")
        async with _started(model, flags) as started:
            began_s = time.monotonic()
            show(counts)
            await send_batch(files, started, api_key, concurrency, show)

    try:
        with ProgressDisplay() as display:
            asyncio.run(send(display))
    except (BatchError, OSError) as error:
        fail(f"{error}; {_so_far(counts)}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        note(f"stopped: {_so_far(counts)}")
        raise SystemExit(_INTERRUPTED) from None
    finally:
        files.close()
    seconds = time.monotonic() - began_s
    new = counts.done - first.done
    note(f"{new} requests answered in {seconds:.1f} s, {counts.failed} of them with an error: {output}")
    if counts.failed:
        raise SystemExit(1)


def _so_far(counts: tuple[int, int, int]) -> str:
    total, done, _ = counts
    return f"{done} of {total} requests have answers; run the command again to go on"


@asynccontextmanager
async def _started(model: str, flags: Sequence[str]) -> AsyncIterator[str]:
    """Start a server on a socket in a temporary folder, and yield its URL when the server is ready.

    Raises:
        BatchError: the server ended before it was ready, and has printed the reason.
    """
    import aiohttp

    from lorikeet.cli.batch_sender import BatchError

    with TemporaryDirectory(prefix="lorikeet-") as folder:
        uds = str(Path(folder) / "socket")
        own = ["--uds", uds, "--batch-dir", str(Path(folder) / "batches"), "--log-level", "warning"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _SERVE, "serve", *([model] if model else []), *own, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # An interrupt at the terminal should reach only this command, which then ends the server.
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(uds)) as session:
                while not await _is_ready(session):
                    if process.returncode is not None:
                        raise BatchError(f"the server ended with {process.returncode}")
                    await asyncio.sleep(_LOOK_S)
            yield f"unix:{uds}"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _is_ready(session: object) -> bool:
    import aiohttp

    assert isinstance(session, aiohttp.ClientSession)
    try:
        async with session.get("http://localhost/health/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False
