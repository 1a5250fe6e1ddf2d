"""Names what to install for a part that is not installed by default."""

DISTRIBUTION = "lorikeet-serve"
"""Name on the package index. The import package and the command are called ``lorikeet``."""


def install_command(extra: str) -> str:
    """Return the shell command that installs one of the extras in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
