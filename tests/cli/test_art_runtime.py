"""The launcher for ART: its flags become those of ``lorikeet serve``."""

import json
import os
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.cli.art_runtime import serve_arguments

ENGINE = {"generation_config": "vllm", "enable_lora": True, "max_loras": 2, "enable_sleep_mode": False}
SERVER = {"return_tokens_as_token_ids": True, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
FLAGS = [
    *("--model=org/base", "--port=8123", "--host=127.0.0.1", "--cuda-visible-devices=0", "--lora-path=/runs/0"),
    *("--served-model-name=agent@0", f"--server-args-json={json.dumps({**SERVER, 'api_key': 'default'})}"),
]


def launched(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Any, list[str]]:
    """Run the command, and return its result and the command line that takes its place."""
    lines: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, line: lines.append(line))
    monkeypatch.setitem(os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "")
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(app, ["art-runtime", *FLAGS, *flags])
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == ("1" if lines else "")
    return result, lines[0] if lines else []


def test_arts_flags_become_those_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {**ENGINE, "allowed_local_media_path": "/tmp", "max_model_len": 4096, "seed": None}
    result, line = launched(monkeypatch, "--rollout-weights-mode=lora", f"--engine-args-json={json.dumps(engine)}")
    assert result.exit_code == 0, result.output
    assert line[:5] == [sys.executable, "-m", "lorikeet.cli.main", "serve", "org/base"]
    text = " ".join(line)
    for part in (
        "--generation-config vllm --enable-lora --max-loras 2",
        "--max-model-len 4096",
        "--return-tokens-as-token-ids --enable-auto-tool-choice --tool-call-parser hermes --api-key default",
        "--lora-modules agent@0=/runs/0 --host 127.0.0.1 --port 8123",
    ):
        assert part in text
    assert "allowed-local-media-path" not in text
    assert "--allowed-local-media-path is ignored" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout-weights-mode=merged"], "rollout_weights_mode"),
        (["--engine-args-json=[]"], "not a JSON object"),
        (["--engine-args-json={"], "not valid JSON"),
    ],
)
def test_what_cannot_be_served_ends_the_command(monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str) -> None:
    result, line = launched(monkeypatch, *flags)
    assert result.exit_code == 2
    assert not line
    assert words in result.output


def test_false_leaves_a_flag_out_or_negates_it() -> None:
    given = {
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "dtype": "bfloat16",
        "lora_modules": ["a=b", "c=d"],
    }
    arguments, ignored = serve_arguments(given)
    assert arguments == [
        *("--no-enable-prefix-caching", "--dtype", "bfloat16"),
        *("--lora-modules", "a=b", "--lora-modules", "c=d"),
    ]
    assert ignored == []
