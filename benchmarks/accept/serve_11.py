"""serve.11: the documents are there and their links lead somewhere; lint, types and import rules are clean."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns

CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports",))

WANTED = {
    "README.md": (r"make serve", r"make test", r"\.svg", r"(?i)is not"),
    "docs/architecture.md": (r"(?i)journey", r"(?i)owner", r"(?i)glossary"),
    "docs/api.md": (r"(?i)\bnow\b", r"501", r"(?i)\blater\b"),
    "LICENSE": (r"Apache License\s+Version 2\.0", r"END OF TERMS AND CONDITIONS"),
    "CHANGELOG.md": (r"## ",),
}

_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


@line("serve.11", title="Documents, licence, lint, types and import rules", bound="nothing missing, nothing reported")
def run(runs: StoredRuns) -> Result:
    """Run the tools and read the documents; always fresh, since it takes seconds."""
    problems = [problem for command in CHECKS for problem in _run_tool(*command)]
    problems += [problem for name, patterns in WANTED.items() for problem in _check_document(name, patterns)]
    problems += _check_links()
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    if not decisions:
        problems.append("docs/decisions/ is empty")
    figure = {"problems": len(problems), "decisions": len(decisions)}
    return Result(
        figure, passed=not problems, cause="; ".join(problems), notes="ruff, mypy, import-linter; links checked"
    )


def _run_tool(name: str, *arguments: str) -> list[str]:
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [f"{' '.join((name, *arguments))} reports problems"] if done.returncode else []


def _check_document(name: str, patterns: tuple[str, ...]) -> list[str]:
    file = ROOT / name
    if not file.is_file():
        return [f"{name} is missing"]
    text = file.read_text()
    return [f"{name} has nothing like {pattern!r}" for pattern in patterns if not re.search(pattern, text)]


def _check_links() -> list[str]:
    """Relative links in the README and in docs/ must point to files of the repository."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        f"{page.relative_to(ROOT)} links to {target}, which is not there"
        for page in pages
        if page.is_file()
        for target in _LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
