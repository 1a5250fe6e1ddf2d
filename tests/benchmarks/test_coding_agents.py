"""Codex and Claude Code, unchanged, finish a small task against the server."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.coding_agents import AGENTS, BROKEN, FIXED, is_installed, run


def carry_out(tool: str, arguments: dict[str, Any], file: Path) -> None:
    """Do what an agent does with a call of the model."""
    if "cmd" in arguments or "command" in arguments:
        subprocess.run(arguments.get("cmd") or arguments["command"], shell=True, cwd=file.parent, check=True)
    elif tool == "apply_patch":
        lines = arguments["input"].splitlines()
        (old,) = [line[1:] for line in lines if line.startswith("-")]
        (new,) = [line[1:] for line in lines if line.startswith("+")]
        file.write_text(file.read_text().replace(old, new))
    elif tool == "Edit":
        assert arguments["file_path"] == str(file)
        file.write_text(file.read_text().replace(arguments["old_string"], arguments["new_string"]))


@pytest.mark.parametrize("name", AGENTS)
def test_the_scripted_calls_of_an_agent_finish_the_task(name: str, tmp_path: Path) -> None:
    file = tmp_path / "calc.py"
    file.write_text(BROKEN)
    for tool, arguments in AGENTS[name].calls(file):
        carry_out(tool, arguments, file)
    assert file.read_text() == FIXED


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", AGENTS)
def test_an_unchanged_coding_agent_finishes_a_small_task(name: str) -> None:
    if not is_installed():
        pytest.skip("the agents are not installed: run python -m benchmarks.clients.coding_agents once")
    assert run(AGENTS[name]) == ""
