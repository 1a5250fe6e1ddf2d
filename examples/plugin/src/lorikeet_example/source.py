"""Adapters from a shelf: ``shelf://NAME`` is the folder NAME in the folder that the variable SHELF names."""

import os
from pathlib import Path
from typing import BinaryIO

from lorikeet.adapters.source_plugin import AdapterSource


class Shelf(AdapterSource):
    """Reads adapters from the folder that SHELF names."""

    def open(self, url: str, name: str) -> BinaryIO:
        """Open a file of an adapter."""
        return (Path(os.environ["SHELF"]) / url.removeprefix("shelf://") / name).open("rb")
