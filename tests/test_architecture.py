"""What import rules cannot see: what is really loaded, and what each file may hold."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded_by(module: str) -> set[str]:
    """Return the top-level packages that importing ``module`` loads in a fresh process."""
    script = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["lorikeet.api.run", "lorikeet.router.run", "lorikeet.client.client", "lorikeet.adapters.catalog"]
)
def test_the_api_process_loads_neither_torch_nor_transformers(module: str) -> None:
    assert not loaded_by(module) & {"torch", "transformers", "peft"}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lorikeet.scheduling.scheduler", "lorikeet.memory.memory", "lorikeet.engine.loop"])
def test_the_loop_and_its_policies_load_neither_torch_nor_a_web_framework(module: str) -> None:
    assert not loaded_by(module) & {"torch", "ray", "fastapi", "uvicorn"}


def test_only_the_commands_print() -> None:
    printing = re.compile(r"^\s*print\(", re.MULTILINE)
    files = [file for file in (ROOT / "src").rglob("*.py") if printing.search(file.read_text())]
    assert {file.relative_to(ROOT / "src" / "lorikeet").parts[0] for file in files} == {"cli"}


def test_public_class_names_are_unique() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(file.relative_to(ROOT)))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_test_modules_share_helpers_through_modules_without_tests() -> None:
    imports = re.compile(r"^\s*(?:from tests[\w.]*\.test_\w+ import|from tests[\w.]* import .*\btest_)", re.MULTILINE)
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert [str(file.relative_to(ROOT)) for file in files if imports.search(file.read_text())] == []
