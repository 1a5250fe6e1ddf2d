"""The repository's pages and sources: paths, headings and code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {file: file.read_text() for file in (ROOT / "src" / "lorikeet").rglob("*.py")}


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
