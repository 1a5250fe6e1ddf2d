"""vLLM's own HTTP tests against Lorikeet, unmodified: ``python -m benchmarks.vllm_tests`` prints what passes.

The tests come with vLLM's source distribution. They and the few packages that they import get an environment below
``.venvs/vllm-tests``; vLLM itself is not built. Their ``RemoteOpenAIServer`` starts Lorikeet instead
(``benchmarks/vllm_shim.py``), with SmolLM2-135M-Instruct under the names of the tests' models and the sample adapters
under those of their adapters. Tests of images get a tiny random model that sees, and pictures as ``data:`` URLs.

Every test that fails is listed with its reason (``benchmarks/vllm_reasons.py``), or as unexplained. One that depends on
what its model says is run again with a server whose model says what such a model would
(``benchmarks/scripted_serve.py``), and must pass then.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environments import environment, pip_install
from benchmarks.harness import LORIKEET, ROOT, default_model, print_setup, print_table
from benchmarks.vllm_reasons import ANSWERS, DIFFERENCES, FILES, NOT_OURS

VLLM = "0.33.0"
FOLDER = ROOT / ".venvs" / "vllm-tests"
PACKAGES = (
    *("pytest==9.1.0", "pytest-asyncio==1.4.0", "pytest-timeout==2.3.1", "openai==2.44.0", "anthropic==0.112.0"),
    *("fastapi==0.136.3", "httpx==0.27.2", "jsonschema==4.23.0", "prometheus-client==0.22.0", "psutil==6.1.0"),
    *("pybase64==1.4.3", "regex==2026.2.28", "requests==2.34.2", "transformers==5.20.2", "tokenizers==0.23.2"),
)
"""The versions of vLLM's own requirements for tests."""
PASSED = "passed"
REPLACED = "with its text"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"
_TEST_S = os.environ.get("LORIKEET_TEST_S", "120")
_MODEL = "passes once the model says what the test expects of it"
_BACKEND = """from pathlib import Path
def get_requires_for_build_wheel(settings=None): return []
def prepare_metadata_for_build_wheel(folder, settings=None):
    made = Path(folder) / "vllm-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return made.name
"""


class Result(NamedTuple):
    """How a test ended, and why if it did not simply pass."""

    test: str
    outcome: str
    why: str = ""


def main() -> None:
    """Run the tests, and print the table and the reasons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("groups", nargs="*", help="some of: " + ", ".join(FILES))
    parser.add_argument("--replaced", action="store_true", help="only with the model's text replaced, which is fast")
    parser.add_argument("-k", dest="keyword", default="", help="only these tests, as in pytest")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(FILES):
        raise SystemExit(f"unknown groups: {', '.join(sorted(unknown))}; there are {', '.join(FILES)}")
    print_setup()
    python = prepare()
    chosen = {}
    for group in options.groups or FILES:
        print(f"running: {group}", flush=True)
        chosen[group] = run_group(python, FILES[group], options.keyword, options.replaced)
    columns = (PASSED, REPLACED, FAILED, NOT_APPLICABLE)
    counts = {group: Counter(result.outcome for result in results) for group, results in chosen.items()}
    counts["all"] = sum(counts.values(), Counter[str]())
    rows = [[group, *(count[column] for column in columns)] for group, count in counts.items()]
    print_table(f"HTTP tests of vLLM {VLLM}", ["group", *columns], rows)
    for column in columns[1:]:
        print_reasons(column, [each for results in chosen.values() for each in results if each.outcome == column])


def print_reasons(outcome: str, results: Sequence[Result]) -> None:
    """Print the tests that ended so, by reason."""
    print(f"{outcome}:" if results else f"{outcome}: none")
    for why, number in Counter(result.why for result in results).most_common():
        print(f"  {number} x {why}")
        for result in results if outcome != NOT_APPLICABLE else ():
            if result.why == why:
                print(f"      {result.test}")


# --- the tests and their environment -----------------------------------------------------------------


def prepare() -> Path:
    """Return the Python of the tests' environment, which the first call makes (some 200 MB)."""

    def fill(python: Path) -> None:
        pip_install(python, *PACKAGES)
        with tempfile.TemporaryDirectory() as scratch:
            _unpack_tests(python, Path(scratch))

    python = environment("vllm-tests", (VLLM, PACKAGES), fill)
    shutil.copy(ROOT / "benchmarks" / "vllm_shim.py", FOLDER / "tests" / "conftest.py")
    return python


def image_model() -> Path:
    """Return the folder of a tiny model that sees, and write a picture of each kind that the tests name."""
    # These are needed for one group only, and import torch.
    from tests.chat.images import picture
    from tests.support.vision_model import make_vision_model

    folder = FOLDER / "images"
    if not folder.is_dir():
        make_vision_model(folder / "model", positions=8192)
        rgb = picture((96, 64))
        rgb.save(folder / "2560px-Gfp-wisconsin-madison-the-nature-boardwalk.jpg")
        rgb.convert("L").convert("P").save(folder / "Grayscale_8bits_palette_sample_image.png")
        rgb.save(folder / "1280px-Venn_diagram_rgb.svg.png")
        rgb.convert("RGBA").save(folder / "RGBA_comp.png")
    return folder / "model"


def _unpack_tests(python: Path, scratch: Path) -> None:
    """Fetch vLLM's source distribution and unpack its tests of entrypoints.

    pip asks a package's build backend for its metadata before it keeps the file. vLLM's would need torch and compilers,
    so it gets one that only answers.
    """
    backend = scratch / "setuptools" / "build_meta.py"
    backend.parent.mkdir()
    backend.with_name("__init__.py").touch()
    backend.write_text(_BACKEND.format(version=VLLM))
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(scratch)]
    variables = {**os.environ, "PYTHONPATH": str(scratch)}
    subprocess.run([str(python), "-m", "pip", *fetch, f"vllm=={VLLM}"], env=variables, check=True)
    top = f"vllm-{VLLM}/"
    with tarfile.open(scratch / f"vllm-{VLLM}.tar.gz") as archive:
        for member in archive:
            member.name = member.name.removeprefix(top)
            if member.name.startswith("tests/entrypoints/") or member.name == "tests/__init__.py":
                archive.extract(member, FOLDER, filter="data")


def run_group(python: Path, files: Sequence[str], keyword: str, replaced: bool) -> list[Result]:
    """Run some files, then again those tests that failed and whose model's text is known."""
    paths = [f"{FOLDER}/tests/entrypoints/{file}" for file in files]
    if replaced:
        return _run(python, paths, {**ANSWERS, "*": ("Hello there, this is a text.",)}, keyword)
    results = _run(python, paths, {}, keyword)
    failed = [result.test for result in results if result.outcome == FAILED and _listed(ANSWERS, result.test)]
    if failed:
        ids = [f"{FOLDER}/tests/entrypoints/{test}" for test in failed]
        passed = {result.test for result in _run(python, ids, ANSWERS) if result.outcome == PASSED}
        results = [Result(each.test, REPLACED, _MODEL) if each.test in passed else each for each in results]
    return results


def _run(python: Path, tests: Sequence[str], answers: Mapping[str, Sequence[str]], keyword: str = "") -> list[Result]:
    """Run pytest on files or tests in a folder of its own."""
    is_about_images = any("/multimodal/" in test for test in tests)
    command = [LORIKEET] if not answers else [sys.executable, "-m", "benchmarks.scripted_serve"]
    with tempfile.TemporaryDirectory(prefix="lorikeet-vllm-tests-") as scratch:
        variables = {
            **os.environ,
            "PYTHONPATH": "",
            "LORIKEET_PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "LORIKEET_COMMAND": json.dumps([*command, "serve"]),
            "LORIKEET_MODEL": str(image_model() if is_about_images else default_model()),
            "LORIKEET_IMAGES": str(FOLDER / "images"),
            "LORIKEET_ADAPTERS": str(ROOT / "examples" / "adapters"),
            "LORIKEET_ANSWERS": json.dumps(answers),
            "LORIKEET_SCRATCH": scratch,
            "HF_HUB_CACHE": f"{scratch}/hub",
            "HF_HUB_OFFLINE": "1",
            "LORIKEET_TORCH": sysconfig.get_path("purelib") if any("prompt_embeds" in test for test in tests) else "",
        }
        options = [
            "-q",
            "--tb=short",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            "--timeout",
            _TEST_S,
            "--basetemp",
            f"{scratch}/tmp",
        ]
        options += ["--rootdir", str(FOLDER)]
        options += ["-k", keyword] if keyword else []
        log = Path(scratch) / "pytest.log"
        with log.open("wb") as output:
            subprocess.run(
                [str(python), "-m", "pytest", *options, *tests],
                cwd=scratch,
                env=variables,
                stdout=output,
                stderr=output,
            )
        shutil.copy(log, FOLDER / ("replaced.log" if answers else "pytest.log"))
        if (of_servers := Path(scratch, "server.log")).is_file():
            shutil.copy(of_servers, FOLDER)
        lines = Path(scratch, "results.jsonl")
        notes = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    if not notes:
        raise SystemExit(f"no test ran; {FOLDER}/pytest.log says why")
    return _results(notes)


def _results(notes: Sequence[dict[str, Any]]) -> list[Result]:
    results: dict[str, Result] = {}
    for each in notes:
        if "flags" in each:
            print(f"  flags left out: {', '.join(each['flags'])}")
        elif "file" in each:
            results[each["file"]] = Result(each["file"], FAILED, f"NOT COLLECTED: {each['message']}")
        elif (known := results.get(each["id"])) is None or known.outcome == PASSED:
            results[each["id"]] = _classify(each["id"], each["outcome"], each["message"])
    return list(results.values())


def _classify(test: str, outcome: str, message: str) -> Result:
    if outcome == "passed":
        return Result(test, PASSED)
    if outcome == "skipped":
        return Result(test, NOT_APPLICABLE, message.removeprefix("Skipped: "))
    if other := _listed(NOT_OURS, test):
        return Result(test, NOT_APPLICABLE, other)
    return Result(test, FAILED, _listed(DIFFERENCES, test) or f"UNEXPLAINED: {message[:200]!r}")


def _listed(table: Mapping[str, Any], test: str) -> Any:
    return next((value for pattern, value in table.items() if fnmatch(test, pattern)), None)


if __name__ == "__main__":
    main()
