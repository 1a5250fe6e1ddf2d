"""Codex and Claude Code, unchanged, finish a small task against the server."""

import pytest

from benchmarks.clients.coding_agents import AGENTS, is_installed, run


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", AGENTS)
def test_an_unchanged_coding_agent_finishes_a_small_task(name: str) -> None:
    if not is_installed():
        pytest.skip("the agents are not installed: run python -m benchmarks.clients.coding_agents once")
    assert run(AGENTS[name]) == ""
