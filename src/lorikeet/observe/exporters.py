"""Runs exporters: plug-ins that get every ended request, for example to write it to another system."""

from abc import ABC, abstractmethod

import structlog

from lorikeet.observe.ended_request import EndedRequest
from lorikeet.plugins import PolicyRegistry

log = structlog.get_logger("lorikeet")


class Exporter(ABC):
    """Exports ended requests. The server calls it on the event loop, so work that waits belongs in a separate thread.

    The keyword-only arguments of the constructor are its parameters: ``--exporter 'mine(path=/var/log/requests)'``.

    Args:
        model_name: name of the base model.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    @abstractmethod
    def on_ended(self, ended: EndedRequest) -> None:
        """Export a request that has ended."""

    def close(self) -> None:  # noqa: B027  # optional
        """Send the remaining requests. The server calls this in a thread before it ends."""


EXPORTERS: PolicyRegistry[Exporter] = PolicyRegistry("lorikeet.exporters", "exporter", {})
"""All exporters by name."""


class GuardedExporter:
    """Calls an exporter and catches its errors, so that requests do not fail. The first error is logged.

    Args:
        exporter: the exporter.
        name: the exporter's name, for the log.
    """

    def __init__(self, exporter: Exporter, name: str) -> None:
        self._exporter = exporter
        self._name = name
        self._has_failed = False

    def on_ended(self, ended: EndedRequest) -> None:
        """Export a request that has ended."""
        try:
            self._exporter.on_ended(ended)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log.error("exporter failed, further errors are not logged", exporter=self._name, error=repr(error))

    def close(self) -> None:
        """Close the exporter."""
        self._exporter.close()


def open_exporters(names: tuple[str, ...], model_name: str) -> tuple[GuardedExporter, ...]:
    """Create exporters.

    Args:
        names: names with parameters.
        model_name: name of the base model.

    Raises:
        ConfigError: an exporter does not exist or cannot be imported, or a parameter is wrong.
    """
    return tuple(GuardedExporter(EXPORTERS[name](model_name), name) for name in names)
