"""A package from outside: found by its entry points, used by a server, a simulation and the list of presets."""

import importlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lorikeet import plugins
from lorikeet.cli.serve_checks import check_policies
from lorikeet.config import ConfigError
from lorikeet.core.events import RequestTimings
from lorikeet.models.default import prepare_default_model
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.exporters import Exporter, GuardedExporter
from lorikeet.plugins import Plugin, PolicyRegistry, split_options
from lorikeet.policies import BATCHING, EVICTION, POLICIES
from lorikeet.presets import PRESETS, resolve_preset
from tests.support.documents import code_blocks
from tests.support.scripted import request
from tests.support.served import ADAPTERS, COMMAND, serving

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment in which a wheel of the example is installed; torch is not copied."""
    folder = tmp_path_factory.mktemp("stranger")
    copy, wheels = folder / "source", folder / "wheels"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(copy)], check=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    offline = ("--no-index", "--no-deps")
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(copy)], check=True)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    (site / "lorikeet.pth").write_text("\n".join(path for path in sys.path if Path(path).is_dir()))
    (wheel,) = wheels.glob("lorikeet_example-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", *offline, str(wheel)], check=True)
    return python


def lorikeet(python: Path, *arguments: str) -> str:
    """Return what a command prints in the stranger's environment."""
    done = subprocess.run([str(python), "-c", COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
async def test_server_uses_eviction_policy_source_and_exporter_of_a_wheel(
    stranger: Path, default_model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(stranger))
    monkeypatch.setenv("SHELF", str(ADAPTERS))
    flags = ["--preset", "example", "--lora-modules", "pirate=shelf://pirate", "--dtype", "float32"]
    flags += ["--memory", "256MiB", "--max-model-len", "1024"]
    flags += ["--served-model-name", "base", "--exporter", f"lines(path={tmp_path / 'lines'})"]
    async with serving(prepare_default_model(default_model_cache), tmp_path, *flags) as server:
        answers = []
        for model in ("base", "pirate"):
            body = {"model": model, "prompt": "Explain gravity.", "temperature": 0, "max_tokens": 8}
            reply = await server.http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["text"])
        assert answers[0] != answers[1]
    assert [line.split()[0] for line in (tmp_path / "lines").read_text().splitlines()] == ["base", "pirate"]


@pytest.mark.slow
def test_simulation_uses_routing_policy_of_a_wheel(stranger: Path) -> None:
    shape = ("--replicas", "2", "--rate", "4", "--count", "40", "--adapters", "8", "--ranks", "8")
    shown = lorikeet(stranger, "simulate", "--profile", "a100-80-llama-2-7b", "--preset", "example", *shape)
    assert "routing by-name" in shown


@pytest.mark.slow
def test_presets_of_a_wheel_are_listed_by_package(stranger: Path) -> None:
    assert "lorikeet-example" in (shown := lorikeet(stranger, "presets", "--all"))
    assert "the largest adapters are evicted first" in shown
    assert "example" not in lorikeet(stranger, "presets")


def test_page_shows_the_files_of_the_example() -> None:
    files = [file.read_text() for file in EXAMPLE.rglob("*.py") if file.name != "__init__.py"]
    shown = {file[file.index('"""', 3) + 3 :].strip() for file in files}  # without the docstring of the module
    assert {block.strip() for block in code_blocks(ROOT / "docs" / "plugins.md", "python")} == shown


# --- names ---------------------------------------------------------------------------------------------


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str, str], None]]:
    """Returns a function that installs the metadata of a package with one entry point."""

    def install(package: str, group: str, name: str, target: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
        plugins._others.cache_clear()
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    plugins._others.cache_clear()


Offer = Callable[[str, str, str, str], None]


def test_two_packages_with_one_name_are_an_error_where_the_name_is_used(offer: Offer) -> None:
    offer("first", "lorikeet.eviction", "mine", "first:Policy")
    offer("second", "lorikeet.eviction", "mine", "second:Policy")
    with pytest.raises(ConfigError, match=r"'mine' is offered twice.*package first 1\.0.*package second 1\.0"):
        EVICTION.load("mine")
    assert EVICTION.load("lru").__name__ == "Lru"


def test_package_that_cannot_be_imported_is_named_with_its_entry_point(offer: Offer) -> None:
    offer("broken", "lorikeet.eviction", "mine", "not_there:Policy")
    with pytest.raises(ConfigError, match=r"package broken 1\.0 \(entry point lorikeet\.eviction: mine = not_there"):
        check_policies("auto,eviction=mine")
    check_policies("auto,eviction=lru")


def test_presets_of_a_broken_package_are_reported_and_the_others_listed(offer: Offer) -> None:
    offer("broken", "lorikeet.presets", "theirs", "not_there:PRESETS")
    errors: list[ConfigError] = []
    assert len(PRESETS.groups(errors.append)) == 7
    assert "package broken 1.0" in str(errors[0])
    with pytest.raises(ConfigError, match="cannot be imported"):
        resolve_preset("theirs")
    assert resolve_preset("auto")[0] == "lorikeet:auto"


def test_packages_cannot_replace_own_names(offer: Offer) -> None:
    offer("other", "lorikeet.eviction", "elora", "other:Policy")
    offer("another", "lorikeet.eviction", "lru", "another:Policy")
    assert EVICTION.load("elora").__name__ == "Elora"
    assert EVICTION.load("lru").__name__ == "Lru"


# --- parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("dlora:patience-64", r"dlora has parameters, with these defaults: dlora\(tuned=true,patience=1024\)"),
        ("dlora(patients=64)", "unknown parameter 'patients'; did you mean patience?"),
        ("dlora(patience=long)", "Expected `float`, got `str`"),
        ("unmerged(patience=64)", "the policy has no parameters"),
        ("dlora(patience=64", "expected NAME or NAME"),
        ("delora", "unknown batching mode 'delora'; did you mean dlora?"),
    ],
)
def test_wrong_policy_or_parameter_is_named(value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BATCHING[value]
    with pytest.raises(ConfigError, match=complaint):
        check_policies(f"dlora,batching={value}")


def test_parameters_have_the_types_of_their_annotations() -> None:
    class Policy:
        def __init__(self, view: object, *, share: float = 0.5, count: int = 1, deep: bool = False) -> None:
            self.given = (view, share, count, deep)

    registry: PolicyRegistry[Policy] = PolicyRegistry("lorikeet.nothing", "policy", {"mine": Policy})
    assert registry["mine(share=1, count=2,deep=true)"]("view").given == ("view", 1.0, 2, True)
    assert registry["mine"]("view").given == ("view", 0.5, 1, False)
    assert registry.parameters("mine") == {"share": 0.5, "count": 1, "deep": False}


def test_commas_in_brackets_do_not_separate_options() -> None:
    assert split_options("dlora, batching=dlora(patience=64,tuned=false),routing=random") == [
        "dlora",
        "batching=dlora(patience=64,tuned=false)",
        "routing=random",
    ]


def test_every_own_policy_can_be_imported() -> None:
    for registry in POLICIES.values():
        for name in registry:
            assert isinstance(registry.load(name), type), name


def test_start_with_the_default_preset_reads_no_metadata_of_other_packages() -> None:
    code = (
        "from lorikeet import plugins; from lorikeet.policies import POLICIES; from lorikeet.presets import *;"
        "_, preset = resolve_preset('auto');"
        "[registry.load(getattr(preset, option)) for option, registry in POLICIES.items()];"
        "assert not plugins._others.cache_info().currsize and not plugins._own_groups.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_error_of_an_exporter_fails_no_request_and_is_logged_once() -> None:
    class Failing(Exporter):
        calls = 0

        def on_ended(self, ended: EndedRequest) -> None:
            self.calls += 1
            raise OSError("disk full")

    exporter = Failing("base")
    guarded = GuardedExporter(exporter, "failing")
    with capture_logs() as logged:
        for _ in range(2):
            guarded.on_ended(EndedRequest(request("one", [1]), RequestTimings(0.0), 1, "stop", 1.0))
    assert exporter.calls == 2
    assert [line["error"] for line in logged] == ["OSError('disk full')"]


def test_plugin_shows_package_and_entry_point() -> None:
    shown = str(Plugin("lorikeet.eviction", "mine", "acme.lru:Lru", "acme 1.0"))
    assert shown == "'mine' of package acme 1.0 (entry point lorikeet.eviction: mine = acme.lru:Lru)"
