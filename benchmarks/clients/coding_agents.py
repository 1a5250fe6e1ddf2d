"""Runs Codex and Claude Code, pinned and unchanged, on a small task: ``python -m benchmarks.clients.coding_agents``.

Each agent must repair a function of one line. The model's answers are scripted (``benchmarks.scripted_serve``);
everything else is the real server: prompts of the agents' sizes, their tools, templates, parsers, streams and an
adapter. An agent has done its task when it has run the calls of the model, sent their results back, and printed the
last text.

The packages are installed below ``.venvs/agents`` from npm, about 700 MB. Each agent has an empty home, no variables of
this process, and no key.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import (
    ROOT,
    default_model,
    print_setup,
    print_table,
    running_server,
    sample_adapters,
    sample_flags,
)

FOLDER = ROOT / ".venvs" / "agents"
PACKAGES = ("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197")
_STAMP = FOLDER / ".packages"
"""File with the names of the installed packages."""
MODEL = "pirate"
KNOWN_MODEL = "gpt-5.5"
"""Another name of the adapter: Codex edits files by a tool of free text only with models that it knows."""
BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = BROKEN.replace("-", "+")
LAST = "The function adds now."
_AGENT_S = 180
_CONTEXT_TOKENS = 2**17
"""More tokens than an agent's prompt and the answer that it allows; the scripted engine keeps no KV."""
_CODEX = """
model = "{model}"
model_provider = "lorikeet"
[model_providers.lorikeet]
name = "Lorikeet"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Agent(NamedTuple):
    """A coding agent.

    Attributes:
        calls: function that returns the model's calls, one per answer, given the file to repair.
        command: function that returns the agent's command, given the server's address and the agent's home.
        variables: function that returns the agent's environment variables, given the server's address.
    """

    calls: Callable[[Path], Sequence[tuple[str, dict[str, Any]]]]
    command: Callable[[str, Path], list[str]]
    variables: Callable[[str], dict[str, str]]


def _calls_of_codex(file: Path) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("exec_command", {"cmd": f"cat {file.name}"}),
        ("exec_command", {"cmd": f"sed -i s/-/+/ {file.name} && cat {file.name}", "workdir": str(file.parent)}),
    ]


def _calls_of_freeform(file: Path) -> list[tuple[str, dict[str, Any]]]:
    lines = ["*** Begin Patch", f"*** Update File: {file.name}", "@@", "-    return a - b", "+    return a + b"]
    return [("apply_patch", {"input": "\n".join([*lines, "*** End Patch"])})]


def _codex(url: str, home: Path, model: str = MODEL) -> list[str]:
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(_CODEX.format(model=model, url=url))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return ["node", str(FOLDER / "node_modules/@openai/codex/bin/codex.js"), "exec", *options]


def _calls_of_claude(file: Path) -> list[tuple[str, dict[str, Any]]]:
    old, new = "return a - b", "return a + b"
    return [
        ("Read", {"file_path": str(file)}),
        ("Edit", {"file_path": str(file), "old_string": old, "new_string": new}),
        ("Bash", {"command": f"cat {file.name}", "description": "Show the file"}),
    ]


def _claude(url: str, home: Path) -> list[str]:
    wrapper = FOLDER / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    return ["node", str(wrapper), "--model", MODEL, "--allowedTools", "Read,Edit,Bash", "-p"]


AGENTS = {
    "codex": Agent(_calls_of_codex, _codex, lambda url: {}),
    "codex-freeform": Agent(_calls_of_freeform, partial(_codex, model=KNOWN_MODEL), lambda url: {}),
    "claude-code": Agent(
        _calls_of_claude,
        _claude,
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
}


def main() -> None:
    """Install the agents, run each, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("agents", nargs="*", help="some of: " + ", ".join(AGENTS))
    chosen = parser.parse_args().agents or list(AGENTS)
    if unknown := set(chosen) - AGENTS.keys():
        raise SystemExit(f"unknown agents: {', '.join(sorted(unknown))}; there are {', '.join(AGENTS)}")
    print_setup()
    install()
    failures = {name: failure for name in chosen if (failure := run(AGENTS[name]))}
    rows = [[name, "failed" if name in failures else "passed"] for name in chosen]
    print_table(f"coding agents, unchanged, with the adapter {MODEL}", ["agent", "task"], rows)
    for name, failure in failures.items():
        print(f"{name}: {failure}")
    sys.exit(bool(failures))


def is_installed() -> bool:
    """Return whether the packages are installed in these versions."""
    return _STAMP.is_file() and _STAMP.read_text() == repr(PACKAGES)


def install() -> None:
    """Install missing packages without their install scripts, which nothing here needs."""
    if is_installed():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(FOLDER), "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, check=True)
    _STAMP.write_text(repr(PACKAGES))


def run(agent: Agent) -> str:
    """Let an agent do the task; return the reason of a failure, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-agents-") as scratch:
        home, project, said = (Path(scratch) / name for name in ("home", "project", "said.json"))
        home.mkdir()
        project.mkdir()
        file = project / "calc.py"
        file.write_text(BROKEN)
        said.write_text(json.dumps([*map(_call, agent.calls(file)), LAST]))
        log = Path(scratch) / "server.log"
        model = _model(Path(scratch) / "model")
        known = ["--lora-modules", f"{KNOWN_MODEL}={sample_adapters()[MODEL]}"]
        flags = [str(model), *sample_flags(), *known, "--tool-call-parser", "hermes", "--store-dir", scratch]
        command = (sys.executable, "-m", "benchmarks.scripted_serve", "serve")
        with running_server(flags, log, command=command, environment={"LORIKEET_SAID": str(said)}) as server:
            outcome = _ask(agent, server.url, home, project)
        refused = [line for line in log.read_text().splitlines() if " status=4" in line or " status=5" in line]
        if file.read_text() != FIXED:
            return f"the file is not repaired: {outcome[-800:]}\n" + "\n".join(refused[:5])
        return "" if LAST in outcome else f"its last text is missing: {outcome[-800:]}"


def _model(folder: Path) -> Path:
    """Return the default model's folder with a longer context."""
    folder.mkdir()
    for file in default_model().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _CONTEXT_TOKENS}))
    return folder


def _call(call: tuple[str, dict[str, Any]]) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _ask(agent: Agent, url: str, home: Path, project: Path) -> str:
    """Return the output of an agent."""
    node = Path(shutil.which("node") or "node").parent
    variables = {"PATH": os.pathsep.join([str(node), "/usr/bin", "/bin"]), "HOME": str(home), **agent.variables(url)}
    command = [*agent.command(url, home), "Make calc.py add its two numbers."]
    try:
        ran = subprocess.run(
            command,
            cwd=project,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_AGENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"it has not ended after {_AGENT_S} s: {late.stdout!r}"
    return ran.stdout


if __name__ == "__main__":
    main()
