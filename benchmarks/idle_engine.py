"""Runs ``lorikeet serve`` with an engine that computes nothing: ``python -m benchmarks.idle_engine serve …``.

Every 25 ms each running request gets the next token of a text, so that only the API process works. A request for one
token gets it immediately. Only the engine process is replaced, and it sends the messages of a real engine. ``python -m
benchmarks.idle_engine ADDRESS`` runs that process.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from lorikeet import __version__
from lorikeet.cli.main import main
from lorikeet.client.local_host import ChildProcess
from lorikeet.config import Settings
from lorikeet.core.clock import boot_id
from lorikeet.core.events import Admitted, Finished, FinishReason, FirstToken, Queued, RequestEvent
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import Abort, BaseInfo, EngineInput, EngineReady, Shutdown, StepOutputs, Submit, TokenOutput
from lorikeet.core.plan import Token
from lorikeet.core.request import Request
from lorikeet.engine.process import Channel, _watch_input
from lorikeet.models.config import read_model_config

_STEP_S = 0.025
_TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
_BLOCK_TOKENS = 16
_BLOCKS = 10_000
_MOST_TOKENS = 8192


def run_engine(address: str) -> None:
    """Answer every request, until ``Shutdown``."""
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineInput)
    folder = Path(msgspec.json.decode(given.settings, type=Settings).model.model)
    channel = Channel(address, given.channel_key)
    threading.Thread(target=_watch_input, args=(channel,), daemon=True).start()
    config = read_model_config(folder)
    geometry = config.geometry(2)
    said = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT.read_text(), add_special_tokens=False).ids
    base = BaseInfo(config.architecture, "nobody", config.vocab_size, config.eos_token_ids, "bfloat16", 0)
    sizes = (_BLOCKS, _BLOCK_TOKENS, geometry.block_bytes(_BLOCK_TOKENS), _MOST_TOKENS, 10**6)
    channel.send(EngineReady(__version__, geometry, *sizes, "none", boot_id(), time.monotonic(), base=base))
    running: dict[RequestId, tuple[Request, int]] = {}
    events: list[RequestEvent] = []
    due_s = 0.0
    while True:
        for message in channel.receive(max(0.0, due_s - time.monotonic()) if running else 3600.0):
            match message:
                case Submit(request):
                    running[request.request_id] = request, 0
                    events.append(Queued(request.request_id, time.monotonic(), request.attempt))
                    events.append(Admitted(request.request_id, time.monotonic(), 0))
                case Abort(request_id):
                    running.pop(request_id, None)
                case Shutdown():
                    channel.close()
                    return
        answered = list(running.items())
        if (now_s := time.monotonic()) >= due_s:
            due_s = max(due_s + _STEP_S, now_s)
        else:
            answered = [each for each in answered if each[1][0].sampling.max_tokens == 1]
        tokens = []
        for number, (request_id, (request, index)) in enumerate(answered):
            token = Token(said[(number * 37 + index) % len(said)])
            tokens.append(TokenOutput(request_id, request.attempt, index, (token,)))
            running[request_id] = request, index + 1
            if index == 0:
                events.append(FirstToken(request_id, now_s))
            if index + 1 == request.sampling.max_tokens:
                del running[request_id]
                events.append(Finished(request_id, now_s, FinishReason.LENGTH))
        if tokens:
            channel.send(StepOutputs(tuple(tokens), tuple(events), ()))
            events = []


class _IdleProcess(ChildProcess):
    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.idle_engine", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.address = address


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from lorikeet.client import local_host

        local_host.ChildProcess = _IdleProcess  # type: ignore[misc]
        main()
    else:
        run_engine(sys.argv[1])
