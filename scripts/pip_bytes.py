"""Adds up what pip fetched, from the sizes that it prints: ``python scripts/pip_bytes.py LOG``.

Runs before anything is installed, so it uses the standard library alone.
"""

import re
import sys
from pathlib import Path

UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
FETCHED = re.compile(r"^\s*Downloading (?:\S+/)?(\S+) \(([\d.]+) (bytes|kB|MB|GB)\)")
CACHED = re.compile(r"^\s*Using cached (?:\S+/)?(\S+) \(([\d.]+) (bytes|kB|MB|GB)\)")
LOCAL = re.compile(r"^\s*Processing (/\S+\.(?:whl|tar\.gz))(?: |$)")


def sizes_bytes(log: str) -> dict[str, dict[str, int]]:
    """Return file → bytes for what pip downloaded, found in its cache, and read from a local folder.

    Metadata that pip fetches before a wheel counts as a file of its own.
    """
    sizes: dict[str, dict[str, int]] = {"downloaded": {}, "cached": {}, "local": {}}
    for line in log.splitlines():
        for kind, pattern in (("downloaded", FETCHED), ("cached", CACHED)):
            if match := pattern.match(line):
                name, number, unit = match.groups()
                sizes[kind][name] = round(float(number) * UNITS[unit])
        if (match := LOCAL.match(line)) and Path(match[1]).is_file():
            sizes["local"][Path(match[1]).name] = Path(match[1]).stat().st_size
    return sizes


def summary(log: str) -> str:
    """Return one line for people: how much came from where."""
    parts = [f"{kind} {sum(files.values()):,} bytes in {len(files)} files" for kind, files in sizes_bytes(log).items()]
    return "packages: " + ", ".join(parts)


if __name__ == "__main__":
    print(summary(Path(sys.argv[1]).read_text()))
