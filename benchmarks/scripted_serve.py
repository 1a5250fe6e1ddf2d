"""Runs ``lorikeet serve`` with an engine that answers from a file: ``python -m benchmarks.scripted_serve serve …``.

The program tests clients whose behaviour depends on the model's text, such as a tool call. Only the engine is replaced.
Templates, parsers, grammars and routes are those of the server. ``LORIKEET_SAID`` names a file with a list of texts,
which may change between requests. Each request gets the next text, and the last text is repeated.
"""

import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from lorikeet.api import run
from lorikeet.cli.main import main
from lorikeet.client.client import Engines
from lorikeet.client.local_host import LocalHost
from lorikeet.config import Settings
from lorikeet.core.messages import BaseInfo, EngineReady, Progress
from lorikeet.core.request import Request
from lorikeet.models.config import read_model_config
from tests.support.fakes import FakeEngine


class ScriptedEngine(FakeEngine):
    """Answers any request with the texts of a file."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings.model.model)
        config = read_model_config(folder)
        super().__init__(self._next, max_model_len=settings.model.max_model_len or config.context_tokens)
        self.engine_info = msgspec.structs.replace(
            self.engine_info,
            geometry=config.geometry(2),
            block_bytes=config.geometry(2).block_bytes(self.engine_info.block_size),
            max_adapter_blocks=10**6,
            base=BaseInfo(
                config.architecture, "a script", config.vocab_size, config.eos_token_ids, "bfloat16", config.hidden_size
            ),
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = config.eos_token_ids[0]
        self._texts: list[str] = []
        self._given = 0

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Do nothing, because the engine is ready immediately."""
        return self.engine_info

    async def close(self) -> None:
        """Do nothing, because nothing is open."""

    def _next(self, request: Request) -> list[int]:
        texts = json.loads(Path(os.environ["LORIKEET_SAID"]).read_text())
        if texts != self._texts:
            self._texts = texts
            self._given = 0
        text = texts[min(self._given, len(texts) - 1)]
        self._given += 1
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]


def open_engines(settings: Settings, host: LocalHost, stack: AsyncExitStack) -> Engines:
    """Return the scripted engine."""
    return ScriptedEngine(settings).as_client()


if __name__ == "__main__":
    run._open_engines = open_engines
    LocalHost.start_early = lambda host: None  # type: ignore[method-assign, assignment]
    main()
