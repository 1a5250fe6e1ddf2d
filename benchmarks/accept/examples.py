"""Lines that are the worked examples of specs, each a unit test."""

from collections.abc import Mapping

from benchmarks.accept.lines import Result
from benchmarks.accept.pytest_runs import run_tests


def run_examples(examples: Mapping[str, str], folder: str) -> Result:
    """Run each example's test by its name.

    Args:
        examples: in words, and its test: file and function.
        folder: of the files.
    """
    done = run_tests([f"{folder}/{test}" for test in examples.values()])
    cases = {example: done.passed.get(_name(test), 0) for example, test in examples.items()}
    missing = [example for example, count in cases.items() if not count]
    failures = [*(f"{name} failed" for name in done.failed), *(f"no case of “{example}” passed" for example in missing)]
    return Result(
        figure={"examples": len(examples) - len(missing), "cases": sum(cases.values())},
        passed=not failures,
        cause="; ".join(failures),
        notes="; ".join(f"{example} ({examples[example].partition('::')[2]})" for example in examples),
        details={"cases": cases},
    )


def _name(test: str) -> str:
    """Return the module or the class of a test, and its function."""
    return "::".join(test.replace(".py", "").split("::")[-2:])
