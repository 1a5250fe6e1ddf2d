"""Runs ``lorikeet serve`` in a process for tests over HTTP."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.models.checkpoints import make_checkpoint
from tests.support.api_server import TEMPLATE, TOKENIZER

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
COMMAND = "from lorikeet.cli.main import main; main()"


def make_model(folder: Path, positions: int = 512) -> Path:
    """Write a tiny random model with a tokenizer and a chat template."""
    make_checkpoint(folder, "llama", vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=positions)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKENIZER.token_to_id("<|im_end|>")}))
    return folder


class Server:
    """One ``lorikeet serve``."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient, printed: list[str]) -> None:
        self.process = process
        self.http = http
        self.printed = printed

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def serving(model: Path, home: Path, *flags: str, port: int = 0) -> AsyncIterator[Server]:
    """Start a server, on a free port unless one is given, wait until it is ready, and end it afterwards."""
    environment = {**os.environ, "XDG_DATA_HOME": str(home), "OMP_NUM_THREADS": "1", "LORIKEET_ENGINE__THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(port), *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**environment, "LORIKEET_ENGINE__MEMORY_BYTES": str(2**24)},
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        while not any(line.startswith("curl ") for line in printed):
            line = await process.stdout.readline()
            assert line, f"the server ended with {await process.wait()} after: {printed}"
            printed.append(line.decode())
        (url,) = re.findall(r"Lorikeet is ready: (\S+)", "".join(printed))
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            yield Server(process, http, printed)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
