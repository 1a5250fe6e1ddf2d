"""``lorikeet serve --deterministic``: an engine that is killed and a server that is started again change no bit."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import write_adapter
from tests.support.served import Server, make_model, serving

pytestmark = pytest.mark.slow

URL = "/v1/completions"
TOKENS = 300


def asked(at: int, **fields: Any) -> dict[str, Any]:
    """A sampled completion under one of two adapters or the base, whose prompt shares a prefix with the others."""
    return {
        "model": ("tiny", "one", "two")[at % 3],
        "prompt": [5 + at % 7 for at in range(60)] + [10 + at] * (at + 1),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": at,
        "logprobs": 2,
        "return_token_ids": True,
        **fields,
    }


def read(choices: list[dict[str, Any]]) -> tuple[list[int], list[float], list[dict[str, float]]]:
    """Return token ids, their log probabilities and the likeliest alternatives of the parts of an answer."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    ids = [token for choice in choices for token in choice["token_ids"] or ()]
    values = [value for part in parts for value in part["token_logprobs"]]
    return ids, values, [top for part in parts for top in part["top_logprobs"]]


async def whole(server: Server, at: int) -> tuple[list[int], list[float], list[dict[str, float]]]:
    reply = await server.http.post(URL, json=asked(at))
    assert reply.status_code == 200, reply.text
    return read(reply.json()["choices"])


def engine_of(server: Server) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (engine,) = (int(pid) for pid in children if b"lorikeet.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return engine


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_kills_restarts_and_other_requests_change_no_bit(tmp_path: Path, dtype: str) -> None:
    model = make_model(tmp_path / "tiny")
    modules = [f"{name}={write_adapter(tmp_path / name, model, seed)}" for seed, name in enumerate(("one", "two"))]
    flags = ("--deterministic", "--dtype", dtype, "--lora-modules", *modules)
    async with serving(model, tmp_path / "first", *flags) as server:
        assert "one order of sums" in (await server.http.get("/health")).json()["kernels"]
        alone = [await whole(server, at) for at in range(3)]
        together = await asyncio.gather(*(whole(server, at) for at in (*range(3), *range(12))))
        assert together[:3] == alone
        assert together[3:6] == alone
        chunks: list[dict[str, Any]] = []
        async with server.http.stream("POST", URL, json=asked(1, stream=True)) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks += json.loads(line[6:])["choices"]
                if len(chunks) == 5:
                    os.kill(engine_of(server), signal.SIGKILL)
        assert read(chunks) == alone[1]
        assert (await server.http.get("/health")).json()["engine_restarts"] == 1
    chunked = ("--max-num-batched-tokens", "16", "--max-num-seqs", "3")
    async with serving(model, tmp_path / "second", *flags, *chunked) as server:
        assert await asyncio.gather(*(whole(server, at) for at in range(3))) == alone
