"""Runs fifteen clients, pinned and unchanged, against the base and two adapters: ``python -m benchmarks.clients``.

Each client has a separate environment below ``.venvs/clients``, since their requirements conflict. The
first run installs them, about 2 GB. The server has SmolLM2-135M-Instruct in float32 and the sample adapters.
``python_checks.py`` and ``node_checks.mjs`` define the calls of the clients.
"""

import argparse
import json
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environments import environment, pip_install
from benchmarks.harness import LORIKEET, ROOT, default_model, print_setup, print_table, running_server, sample_adapters
from lorikeet.models.default import NAME

FOLDER = ROOT / ".venvs" / "clients"
HERE = Path(__file__).parent
MODELS = (NAME, "pirate", "formal")
PYTHON: dict[str, Sequence[str]] = {
    "openai": ("openai==3.57.0",),
    "litellm": ("litellm==1.110.2",),
    "langchain-openai": ("langchain-openai==1.7.4",),
    "llama-index": ("llama-index-llms-openai-like==0.8.1",),
    "instructor": ("instructor==1.17.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "llm": ("llm==0.36",),
    "lm-eval": ("lm-eval[api,hf]==0.4.13",),
    "guidellm": ("guidellm==0.8.1",),
    "lorax-client": ("lorax-client==0.6.3",),
    "trl": ("trl==1.16.0",),
    "skyrl": ("skyrl==0.3.0",),
    "renderers": (
        *("renderers==0.1.12", "prime-pydantic-config==0.4.3", "openai-harmony==0.0.8", "tiktoken==0.14.0"),
        "openai==3.57.0",
    ),
    "art": ("openpipe-art==0.5.18",),
}
WITH_TORCH = ("lm-eval", "guidellm", "trl", "skyrl", "renderers", "art")
"""Clients whose environments also see the packages of this one: torch, transformers and PEFT."""
ALONE = ("skyrl", "renderers", "art")
"""Clients that are installed without their requirements, which include CUDA. The clients need few of these."""
NODE: dict[str, Sequence[str]] = {
    "openai-npm": ("openai@7.59.0", "zod@4.6.7"),
    "ai-sdk-npm": ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
}
_CLIENT_S = 600
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main() -> None:
    """Install missing clients, run all checks, and print the table and the failures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("clients", nargs="*", help="some of: " + ", ".join([*PYTHON, *NODE]))
    parser.add_argument("--url", help="of a server that runs already, with the sample adapters")
    options = parser.parse_args()
    chosen = options.clients or [*PYTHON, *NODE]
    if unknown := set(chosen) - PYTHON.keys() - NODE.keys():
        raise SystemExit(f"unknown clients: {', '.join(sorted(unknown))}; there are {', '.join([*PYTHON, *NODE])}")
    print_setup()
    for client in chosen:
        prepare(client)
    if options.url:
        report(chosen, options.url)
        return
    with tempfile.TemporaryDirectory() as scratch:
        flags = ["--dtype", "float32", "--adapter-dir", str(ROOT / "examples" / "adapters"), "--store-dir", scratch]
        with running_server(flags, Path(scratch) / "server.log") as server:
            report(chosen, server.url)


def report(clients: Sequence[str], url: str) -> None:
    """Run all checks against a server and print the results."""
    rows = []
    errors = []
    for client in clients:
        outcomes = [run(client, url, model) for model in MODELS]
        for check in dict.fromkeys(name for outcome in outcomes for name in outcome):
            found = [outcome.get(check, "not run") for outcome in outcomes]
            rows.append([client, check, *("failed" if error else "passed" for error in found)])
            errors += [
                f"{client}, {check}, {model}: {error}" for model, error in zip(MODELS, found, strict=True) if error
            ]
    print_table("clients, unchanged", ["client", "check", *MODELS], rows)
    passed = sum(row[2:].count("passed") for row in rows)
    print(f"{passed} of {len(rows) * len(MODELS)} passed", *errors, sep="\n")


def prepare(client: str) -> None:
    """Install a client into a separate environment, unless it is installed."""

    def fill(python: Path) -> None:
        if client in WITH_TORCH:
            asked = subprocess.run([str(python), "-c", _SITE], capture_output=True, text=True, check=True)
            Path(asked.stdout.strip(), "lorikeet.pth").write_text(sysconfig.get_path("purelib"))
        pip_install(python, *(["--no-deps"] if client in ALONE else []), *PYTHON[client])

    if client in PYTHON:
        environment(f"clients/{client}", PYTHON[client], fill)
        return
    folder = FOLDER / client
    packages = NODE[client]
    stamp = folder / ".packages"
    if stamp.is_file() and stamp.read_text() == repr(packages):
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=folder, check=True)
    stamp.write_text(repr(packages))


def run(client: str, url: str, model: str) -> dict[str, str]:
    """Return the error of each check of a client; empty for a check that passed."""
    folder = FOLDER / client
    if client in PYTHON:
        command = [str(folder / "bin" / "python"), str(HERE / "python_checks.py"), client, url, model]
    else:
        command = ["node", str(HERE / "node_checks.mjs"), client, url, model]
    samples = sample_adapters()
    variables = {
        **os.environ,
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "BASE_FOLDER": str(default_model()),
        "ADAPTER_FOLDER": str(samples.get(model, "")),
        "SAMPLE_ADAPTER": str(samples["terse"]),
        "LORIKEET": LORIKEET,
    }
    ran = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_CLIENT_S, check=False
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"check"')]
    if ran.returncode or not lines:
        lines.append({"check": "starts", "error": ran.stderr[-600:]})
    return {line["check"]: line["error"] for line in lines}


if __name__ == "__main__":
    main()
