"""Record ``docs/images/session.svg``: real commands against a real server, nothing typed in by hand.

    .venv/bin/python examples/record_session.py

Run it in the root of the repository, with the sample adapters in ``examples/adapters``. The server gets a registry of
its own in a temporary folder, so adapters registered on this machine do not show, and are not touched.
"""

import argparse
import io
import os
import pty
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
SVG = ROOT / "docs" / "images" / "session.svg"
SAMPLES = ("pirate", "formal", "json", "terse")
QUESTION = "Why is exercise important?"

SERVE = "lorikeet serve --log-level warning" + "".join(
    f" --lora-modules {name}=examples/adapters/{name}" for name in SAMPLES
)
LIST = "lorikeet adapters list"
INSPECT = "lorikeet adapters inspect examples/adapters/terse"
CHAT = "lorikeet chat --temperature 0 --max-tokens 64"
CHAT_LINES = (QUESTION, *(line for name in SAMPLES for line in ("/new", f"/adapter {name}", QUESTION)), "/quit")

_COLUMNS = 104
_READY = "curl "
_PROMPT = b"> "
_TYPED = r"(?m)^\S+> .*$"
"""What was typed at a prompt of ``lorikeet chat``: in another colour, so that it can be told from the answers."""
_SILENCE_S = 120.0


class RecordingError(RuntimeError):
    """A command did not do what the recording needs."""


def main() -> None:
    """Record the session and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=SVG, help="where the SVG goes")
    out: Path = parser.parse_args().out
    screen = Console(file=io.StringIO(), record=True, width=_COLUMNS, force_terminal=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="lorikeet-session-") as store:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": str(_COLUMNS),
            "FORCE_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
            "LORIKEET_ADAPTERS__STORE_DIR": store,
        }
        with _server(screen, environment):
            _show(screen, CHAT, _conversation(CHAT, CHAT_LINES, environment))
            _show(screen, LIST, _output(LIST, environment))
            _show(screen, INSPECT, _output(INSPECT, environment))
    out.parent.mkdir(parents=True, exist_ok=True)
    screen.save_svg(str(out), title="many adapters, one base model", unique_id="session")


def _show(screen: Console, command: str, output: str) -> None:
    screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    shown = Text.from_ansi(output.rstrip())
    shown.highlight_regex(_TYPED, "bold cyan")
    screen.print(shown)
    screen.print()


def _output(command: str, environment: Mapping[str, str]) -> str:
    """Return all that a command prints.

    Raises:
        RecordingError: it failed.
    """
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RecordingError(f"{command}: {done.stdout}")
    return done.stdout


@contextmanager
def _server(screen: Console, environment: Mapping[str, str]) -> Iterator[None]:
    """Run the server, and show what it prints until it is ready.

    Raises:
        RecordingError: it ended before.
    """
    process = subprocess.Popen(
        f"exec {SERVE}", shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if Text.from_ansi(line).plain.startswith(_READY):
                break
        else:
            raise RecordingError(f"{SERVE}: {''.join(said)}")
        _show(screen, f"{SERVE} &", "".join(said))
        yield
    finally:
        process.terminate()
        process.wait()


def _conversation(command: str, lines: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Run a command on a terminal, type one of ``lines`` at every prompt, and return what the terminal showed.

    Raises:
        RecordingError: it fell silent, or failed.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, to_type = b"", list(lines)
    try:
        while piece := _read(ours):
            shown += piece
            if shown.endswith(_PROMPT) and to_type:
                os.write(ours, to_type.pop(0).encode() + b"\n")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    if to_type:
        raise RecordingError(f"{command}: ended or fell silent before {to_type[0]!r}: {shown.decode()}")
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    """Return what there is to read, nothing at the end."""
    if not select.select([terminal], [], [], _SILENCE_S)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux tells that the other end is closed
        return b""


if __name__ == "__main__":
    main()
