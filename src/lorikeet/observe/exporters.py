"""Exporters: plug-ins that get every request that has ended, such as to write it to a system of your own."""

from abc import ABC, abstractmethod

import structlog

from lorikeet.observe.ended_request import EndedRequest
from lorikeet.plugins import Registry

log = structlog.get_logger("lorikeet")


class Exporter(ABC):
    """Gets the requests that have ended, on the server's event loop. Whatever waits belongs on a thread of its own.

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
        """Send what is left, on a thread. The server ends afterwards."""


EXPORTERS: Registry[Exporter] = Registry("lorikeet.exporters", "exporter", {})
"""All exporters by name."""


class GuardedExporter:
    """Calls an exporter, so that its errors fail no request; the first one is logged.

    Args:
        exporter: the exporter.
        name: its name, for the log.
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
