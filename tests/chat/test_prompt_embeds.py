"""Prompts as embeddings: tensors of torch.save are read, and nothing in them is run."""

import base64
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.chat.embeds import saved, tensor
from tests.support.api_server import Running
from tests.support.fakes import HIDDEN

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"


async def ask(server: Running, embeds: Any, **more: Any) -> httpx.Response:
    body = {"model": "formal", "prompt_embeds": embeds, "max_tokens": 3, **more}
    return await server.http.post(COMPLETIONS, json=body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_tokens", [5, 200])
async def test_embeddings_reach_the_engine_unchanged(server: Running, dtype: torch.dtype, hidden_tokens: int) -> None:
    """A body of 200 tokens in several tensors is read in another process."""
    given = [tensor(hidden_tokens, dtype=dtype, seed=seed) for seed in range(8)]
    reply = await ask(server, [saved(each) for each in given], prompt="")
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 8
    assert reply.json()["usage"]["prompt_tokens"] == 8 * hidden_tokens
    for request, each in zip(server.engine.submitted, given, strict=True):
        assert request.prompt_embeds is not None
        assert len(request.prompt_token_ids) == hidden_tokens
        found = torch.frombuffer(bytearray(request.prompt_embeds.data), dtype=dtype).view(hidden_tokens, HIDDEN)
        assert torch.equal(found, each)
    salts = {request.cache_salt for request in server.engine.submitted}
    assert len(salts) == 8


async def test_kv_of_embeddings_depends_on_their_values_and_the_tenants_salt(server: Running) -> None:
    for seed, salt in ((0, "a"), (0, "a"), (1, "a"), (0, "b")):
        assert (await ask(server, saved(tensor(3, seed=seed)), cache_salt=salt)).status_code == 200
    first, same, other, salted = (request.cache_salt for request in server.engine.submitted)
    assert first == same
    assert len({first, other, salted}) == 3


class Evil:
    """Runs a command when a pickle of it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def packed(data_pkl: bytes, compression: int = zipfile.ZIP_STORED) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/data/0", bytes(4 * HIDDEN))
    return base64.b64encode(file.getvalue()).decode()


async def test_other_pickles_are_refused_without_running_them(server: Running, tmp_path: Path) -> None:
    large = torch.zeros(6, HIDDEN)
    infinite = tensor(2)
    infinite[1, 3] = float("inf")
    wrong = {
        "base64": "?",
        "zip": base64.b64encode(b"nothing").decode(),
        "a pickle that calls": packed(pickle.dumps(Evil(tmp_path / "run"), protocol=2)),
        "inside torch.save": saved(Evil(tmp_path / "run")),
        "a class": packed(b"cos\nsystem\n(S'touch x'\ntR."),
        "no end": packed(b"\x80\x02"),
        "empty": packed(b""),
        "a marker": packed(b"\x80\x02t."),
        "compressed": packed(b"\x80\x02." * 50, zipfile.ZIP_DEFLATED),
        "a dict": saved({"x": large}),
        "integers": saved(torch.zeros(2, HIDDEN, dtype=torch.int64)),
        "a view": saved(large[2:4]),
        "transposed": saved(torch.zeros(HIDDEN, 3).t()),
        "the old format": saved(large, _use_new_zipfile_serialization=False),
        "infinite": saved(infinite),
        "other size": saved(tensor(2, hidden=HIDDEN + 1)),
        "one dimension": saved(torch.zeros(HIDDEN)),
        "no tokens": saved(torch.zeros(0, HIDDEN)),
        "too long": saved(tensor(256)),
    }
    for what, field in wrong.items():
        reply = await ask(server, field)
        assert reply.status_code == 400, what
        assert reply.json()["error"]["param"] == "prompt_embeds", what
    assert list(tmp_path.glob("run")) == []
    reply = await ask(server, [saved(tensor(2)), saved(infinite)])
    assert reply.json()["error"]["message"] == "prompt_embeds.1: has numbers that are not finite."
    assert not server.engine.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x"},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"return_token_ids": True},
        {"truncate_prompt_tokens": 2},
        {"max_tokens": 0},
    ],
)
async def test_fields_that_need_prompt_tokens_are_refused_with_embeddings(
    server: Running, fields: dict[str, Any]
) -> None:
    reply = await ask(server, saved(tensor(2)), **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(fields))
    assert (await server.http.post(COMPLETIONS, json={"model": "base"})).status_code == 400
