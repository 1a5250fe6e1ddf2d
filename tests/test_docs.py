"""What the documents promise: files, names, commands, settings and examples that are really there."""

import html
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lorikeet.cli.app import app
from lorikeet.config import load_settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.plan import TransferDone
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.memory import Memory
from lorikeet.policies import EVICTION
from tests.support.documents import ROOT, SOURCES, code_blocks, headings
from tests.support.scripts import script

ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def readme_commands(start: str) -> Iterator[list[str]]:
    """Yield the words of README's indented lines that begin with ``start``, and of backquoted ones."""
    text = (ROOT / "README.md").read_text()
    for line in re.findall(rf"^    ({re.escape(start)} .*)$|`({re.escape(start)} [^`]*)`", text, re.MULTILINE):
        yield shlex.split("".join(line), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in headings(file)):
            missing.append(target)
    assert not missing


@pytest.mark.slow
def test_the_architecture_page_names_only_classes_and_methods_that_exist() -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+)(?:\.(\w+))?`", ARCHITECTURE.read_text()))
    assert len(named) > 20
    code = "\n".join(SOURCES.values())
    classes = {name for name, _ in named if not re.search(rf"^(class {name}\b|{name}\b.* =)", code, re.MULTILINE)}
    methods = {method for _, method in named if method and not re.search(rf"def {method}\(", code)}
    assert (classes, methods) == (set(), set())


def test_architecture_page_lists_every_package() -> None:
    packages = {
        file.parent.name for file in SOURCES if file.name == "__init__.py" and file.parent.parent.name == "lorikeet"
    }
    table = ARCHITECTURE.read_text().split("## Packages")[1].split("## ")[0]
    listed = {name for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == packages


def test_architecture_page_names_files_that_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE.read_text())
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "src" / "lorikeet" / name).exists()] == []


def test_the_policy_that_the_architecture_page_shows_works(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {}
    exec(code_blocks(ARCHITECTURE, "python")[0], names)
    sizes = {"small": 2, "big": 5, "new": 5}
    monkeypatch.setitem(EVICTION.own, "largest", names["LargestFirst"])
    memory = Memory(10, 0, 16, 1, lambda ref: AdapterSize(sizes[ref.name], 0), "largest")
    for now, name in enumerate(sizes):
        ref = AdapterRef(AdapterName(name), AdapterDigest(name), "", {}, 0)
        lease = memory.try_admit(ref, [], 1, float(now))
        assert isinstance(lease, SequenceLease)
        ((transfer,), _) = memory.take_transfers()
        memory.finish_transfer(TransferDone(transfer.transfer_id), float(now))
        memory.release(lease, float(now))
    assert set(memory.resident()) == {"small", "new"}


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {words[1] for words in readme_commands("make")}
    assert {"serve", "test"} <= asked <= targets


def test_every_lorikeet_command_of_the_readme_exists_with_its_flags() -> None:
    commands = list(readme_commands(".venv/bin/lorikeet"))
    assert commands
    for words in commands:
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, words
            command, rest = command.commands[rest[0]], rest[1:]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in rest if word.startswith("-")} <= options, words


def test_the_settings_page_is_what_the_settings_say() -> None:
    generator = script("docs/make_configuration.py")
    assert generator.PAGE.read_text() == generator.page(), "run .venv/bin/python docs/make_configuration.py"


def test_tables_of_the_api_page_are_up_to_date() -> None:
    generator = script("docs/make_api.py")
    assert generator.PAGE.read_text() == generator.page(), "run .venv/bin/python docs/make_api.py"


def test_the_settings_file_that_the_settings_page_shows_is_valid(tmp_path: Path) -> None:
    (tmp_path / "lorikeet.toml").write_text(code_blocks(ROOT / "docs" / "configuration.md", "toml")[0])
    settings = load_settings(file=tmp_path / "lorikeet.toml", environment={"LORIKEET_SERVER__PORT": "8123"})
    assert settings.server.port == 8123
    assert settings.engine.max_num_seqs == 128


def test_every_decision_has_its_three_parts_and_is_in_the_index() -> None:
    decisions = {file.name: file.read_text() for file in DECISIONS.glob("*.md") if file.name != "README.md"}
    index = (DECISIONS / "README.md").read_text()
    for name, text in decisions.items():
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequence"], name
        assert f"[{text.splitlines()[0].removeprefix('# ')}]({name})" in index


def test_every_library_that_the_package_needs_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in project["dependencies"]}  # type: ignore[index]
    rows = re.findall(r"^\| ([^|]+) \|", (DECISIONS / "libraries.md").read_text(), re.MULTILINE)
    assert needed <= {name.lower() for row in rows for name in row.split(", ")}


def test_the_recorded_session_shows_the_commands_of_its_script() -> None:
    recording = script("examples/record_session.py")
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", recording.SVG.read_text())
    shown = re.sub(r"\s", "", html.unescape("".join(texts)))
    commands = (recording.SERVE, recording.CHAT, recording.LIST, recording.INSPECT, *recording.CHAT_LINES)
    assert [command for command in commands if re.sub(r"\s", "", command) not in shown] == []
