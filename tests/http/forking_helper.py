"""A helper process for ``python -m tests.http.forking_helper``: its child does the work, and never ends."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from lorikeet.http.helper_main import run_helper


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    def answer(message: bytes) -> bytes:
        if not message:
            return b""
        child = os.fork()
        if child == 0:
            signal.pause()
        made = Path(os.fsdecode(setup))
        made.with_suffix(".part").write_text(str(child))
        made.with_suffix(".part").rename(made)
        os.waitpid(child, 0)
        return b"done"

    return answer


if __name__ == "__main__":
    run_helper(prepare, 2**28)
