"""Runs other people's controllers and routers, unchanged, with Lorikeet: ``python -m benchmarks.controllers``.

* ``aibrix``: AIBrix's runtime, which stands beside an engine in each pod. Its calls load, list and unload an adapter,
  each twice in a row, as its controller's reconcile loop does; its metrics are those of the engine under its names.
* ``vllm-router``, ``sglang-router``: each before two Lorikeets, with completions, chats and streams of adapters.
  (vLLM's scores no requests of adapters by events of KV, so its policy ``kv_aware`` is left out.)

They run in environments below ``.venvs``.
"""

import argparse
import json
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.environments import environment, pip_install
from benchmarks.harness import (
    RunningServer,
    default_model,
    print_setup,
    print_table,
    running_server,
    sample_adapters,
    sample_flags,
)

AIBRIX = ("aibrix==0.8.0",)
ROUTERS = ("vllm-router==0.1.17", "sglang-router==0.3.2", "uvicorn", "fastapi", "requests")
AIBRIX_FOLDER = Path("/tmp/aibrix/adapters")
"""Where AIBrix's runtime puts the adapters that it fetches; no option changes it."""
NAME = "pirate"


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    options = parser.parse_args()
    print_setup()
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="lorikeet-controllers-") as scratch, ExitStack() as stack:
            PARTS[name](Path(scratch), stack)


# --- AIBrix ----------------------------------------------------------------------------------------------


def aibrix(scratch: Path, stack: ExitStack) -> None:
    """Let AIBrix's runtime load, list and unload adapters."""
    python = environment("aibrix", AIBRIX, lambda python: pip_install(python, *AIBRIX))
    folder = sample_adapters()[NAME]
    AIBRIX_FOLDER.mkdir(parents=True, exist_ok=True)
    flags = [str(default_model()), "--adapter-dir", str(AIBRIX_FOLDER), "--store-dir", str(scratch / "store")]
    server = stack.enter_context(running_server(flags, scratch / "server.log"))
    shutil.rmtree(AIBRIX_FOLDER / "direct", ignore_errors=True)
    shutil.copytree(folder, AIBRIX_FOLDER / "direct")  # The runtime deletes it when it unloads the adapter.
    variables = {"INFERENCE_ENGINE_ENDPOINT": server.url, "PROMETHEUS_MULTIPROC_DIR": str(scratch / "metrics")}
    command = [str(python.with_name("aibrix_runtime")), "--host", "127.0.0.1"]
    beside = running_server([], scratch / "runtime.log", command=command, environment=variables, health="/healthz")
    runtime = stack.enter_context(beside).url
    rows = list[Sequence[object]]()
    with httpx.Client(timeout=300) as http:

        def call(what: str, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
            reply = http.request(method, url, json=body)
            rows.append([what, reply.status_code, reply.text[:90].replace("\n", " ")])
            return reply

        load, unload = f"{runtime}/v1/lora_adapter/load", f"{runtime}/v1/lora_adapter/unload"
        path = str(AIBRIX_FOLDER / "direct")
        for _ in range(2):
            call("load from a folder", "POST", load, {"lora_name": "direct", "lora_path": path})
        listed = call("list", "GET", f"{runtime}/v1/models").json()
        rows.append(["listed", "", ", ".join(card["id"] for card in listed["data"])])
        body = {"model": "direct", "prompt": "Hi", "max_tokens": 4}
        call("completion", "POST", f"{server.url}/v1/completions", body)
        for _ in range(2):
            call("unload", "POST", unload, {"lora_name": "direct"})
        call("load what is missing", "POST", load, {"lora_name": "a", "lora_path": str(AIBRIX_FOLDER / "missing")})
        page = http.get(f"{runtime}/metrics/").text
        lines = (line for line in page.splitlines() if line.startswith("aibrix:"))
        found = sorted({re.split("[{ ]", line)[0] for line in lines})
        rows.append(["metrics", len(found), ", ".join(found)])
    print_table("AIBrix's runtime 0.8.0 beside Lorikeet", ["call", "status", "answer"], rows)


# --- routers ---------------------------------------------------------------------------------------------


def vllm_router(scratch: Path, stack: ExitStack) -> None:
    """Answer requests through vLLM's router."""
    _route(scratch, stack, "vllm-router", [])


def sglang_router(scratch: Path, stack: ExitStack) -> None:
    """Answer requests through SGLang's router."""
    _route(scratch, stack, "sglang-router", ["launch"])


def _route(scratch: Path, stack: ExitStack, command: str, first: list[str]) -> None:
    servers = _servers(scratch, stack)
    router = _router(scratch, stack, command, [*first, "--policy", "round_robin"], servers)
    rows = list[Sequence[object]]()
    with httpx.Client(base_url=router, timeout=300) as http:
        for model in (default_model().name, *sample_adapters()):
            body: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            chat = {**body, "messages": [{"role": "user", "content": "Hi"}]}
            whole = http.post("/v1/completions", json={**body, "prompt": "Hi"})
            said = http.post("/v1/chat/completions", json=chat)
            with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as reply:
                lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
            text = "".join(
                choice["delta"].get("content") or ""
                for line in lines[:-1]
                for choice in json.loads(line.removeprefix("data: "))["choices"]
            )
            same = said.status_code == 200 and text == said.json()["choices"][0]["message"]["content"]
            ended = bool(lines) and lines[-1] == "data: [DONE]"
            rows.append([model, whole.status_code, said.status_code, reply.status_code, same and ended])
        unknown = http.post("/v1/completions", json={"model": "nobody", "prompt": "Hi"})
        rows.append(["nobody", unknown.status_code, "", "", ""])
    shares = [_finished(server) for server in servers]
    headings = ["model", "completion", "chat", "stream", "stream is whole and the same"]
    print_table(f"{command} before two Lorikeets, which finished {shares[0]} and {shares[1]}", headings, rows)


def _servers(scratch: Path, stack: ExitStack) -> list[RunningServer]:
    """Start two Lorikeets with the sample adapters."""
    servers = []
    for number in range(2):
        flags = [str(default_model()), *sample_flags(), "--store-dir", str(scratch / f"store-{number}")]
        servers.append(stack.enter_context(running_server(flags, scratch / f"server-{number}.log")))
    return servers


def _router(
    scratch: Path, stack: ExitStack, command: str, flags: Sequence[str], servers: Sequence[RunningServer]
) -> str:
    """Start another project's router before servers, and return its address."""
    python = environment("routers", ROUTERS, lambda python: pip_install(python, *ROUTERS))
    urls = [server.url for server in servers]
    arguments = [*flags, "--worker-urls", *urls, "--host", "127.0.0.1", "--prometheus-port", str(_free_port())]
    started = running_server(arguments, scratch / "router.log", command=[str(python.with_name(command))])
    return stack.enter_context(started).url


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _finished(server: RunningServer) -> int:
    """Return the number of requests that a server has finished."""
    return int(httpx.get(f"{server.url}/v1/stats", timeout=60).json()["requests"]["finished"])


PARTS = {"aibrix": aibrix, "vllm-router": vllm_router, "sglang-router": sglang_router}

if __name__ == "__main__":
    main()
