"""Exports requests as lines of text."""

from pathlib import Path

from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.exporters import Exporter


class Lines(Exporter):
    """Appends a line with adapter and seconds of every request to a file.

    Args:
        model_name: name of the base model.
        path: the file.
    """

    def __init__(self, model_name: str, *, path: str) -> None:
        super().__init__(model_name)
        self._file = Path(path).open("a", buffering=1)

    def on_ended(self, ended: EndedRequest) -> None:
        """Write the line."""
        self._file.write(f"{ended.adapter or self.model_name} {ended.e2e_s:.3f}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
