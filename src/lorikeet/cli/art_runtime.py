"""``lorikeet art-runtime``: a server that ART starts instead of its own, by ``ART_VLLM_RUNTIME_BIN``.

ART (openpipe-art) gives its runtime nine flags; two hold arguments of vLLM as JSON. They become the arguments of
``lorikeet serve``, which takes the place of this process.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorikeet.cli.compat import FOREIGN_FLAGS
from lorikeet.cli.console import fail, note
from lorikeet.cli.serve_flags import FLAGS
from lorikeet.core.machine import gpu_models

_LORA = "lora"
_OWN_FLAGS = ("--enable-prefix-caching", "--no-enable-prefix-caching")

Json = Annotated[str, typer.Option(help="JSON object of vLLM's arguments.", metavar="JSON")]


def art_runtime(
    model: Annotated[str, typer.Option(help="Folder or hub id of the base model.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")],
    served_model_name: Annotated[str, typer.Option(help="Name of the first adapter, as NAME@STEP.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    lora_path: Annotated[str, typer.Option(help="Folder of the first adapter.")] = "",
    cuda_visible_devices: Annotated[str, typer.Option(help="GPUs that the server may use.")] = "",
    rollout_weights_mode: Annotated[str, typer.Option(help="lora.")] = _LORA,
    engine_args_json: Json = "{}",
    server_args_json: Json = "{}",
) -> None:
    """Serve for ART: set ART_VLLM_RUNTIME_BIN="lorikeet art-runtime" before training.

    Each step's adapter is loaded under its own name, NAME@STEP.
    """
    if rollout_weights_mode != _LORA:
        fail(
            f"--rollout-weights-mode {rollout_weights_mode}: the weights of the base model cannot be replaced; "
            'set "rollout_weights_mode": "lora" in the config of the trainable model',
            code=2,
        )
    given = {**_object("--engine-args-json", engine_args_json), **_object("--server-args-json", server_args_json)}
    arguments, ignored = serve_arguments(given)
    for flag in ignored:
        note(f"{flag} is ignored: lorikeet serve has no such flag")
    if cuda_visible_devices and gpu_models() and "device" not in given:
        arguments += ["--device", "cuda"]
    if lora_path:
        arguments += ["--lora-modules", f"{served_model_name}={lora_path}"]
    arguments += ["--host", host, "--port", str(port), "--served-model-name", model]
    os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "lorikeet.cli.main", "serve", model, *arguments])


def serve_arguments(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return vLLM's arguments as flags of ``lorikeet serve``, and the flags that it lacks.

    Args:
        given: values by vLLM's names, such as ``max_model_len``; None and false leave a flag out.
    """
    known = {name for flag in FLAGS for part in flag.names.split() for name in part.split("/")}
    known |= {*FOREIGN_FLAGS, *_OWN_FLAGS}
    arguments: list[str] = []
    ignored: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is False and f"--no-{name.replace('_', '-')}" in known:
            flag = f"--no-{name.replace('_', '-')}"
            value = True
        if value is None or value is False:
            continue
        if flag not in known:
            ignored.append(flag)
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, list):
            arguments += [text for each in value for text in (flag, _text(each))]
        else:
            arguments += [flag, _text(value)]
    return arguments, ignored


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(flag: str, text: str) -> dict[str, Any]:
    """Return the object in the value of a flag; another value ends the command."""
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"{flag}: not valid JSON: {error}", code=2)
    if not isinstance(value, dict):
        fail(f"{flag}: not a JSON object", code=2)
    return value
