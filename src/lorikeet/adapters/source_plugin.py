"""The interface of an adapter source, which is a plug-in that reads adapters from URLs of one scheme."""

from abc import ABC, abstractmethod
from typing import BinaryIO

import fsspec

from lorikeet import plugins
from lorikeet.adapters.errors import AdapterError
from lorikeet.config import ConfigError

GROUP = "lorikeet.adapter_sources"
"""Group of entry points. The name of an entry point is the scheme."""


class AdapterSource(ABC):
    """Reads adapters from URLs of one scheme.

    The class is created without arguments, in a new process for each adapter. Lorikeet checks that the URL may be read,
    and applies its limits of size and time to what the source returns.
    """

    @abstractmethod
    def open(self, url: str, name: str) -> BinaryIO:
        """Open one file of an adapter.

        Args:
            url: the adapter's URL, with its scheme.
            name: name of the file, such as ``adapter_config.json``. It may contain a folder.

        Raises:
            FileNotFoundError: there is no such adapter or file.
            OSError: the file cannot be read.
        """


def source_of(scheme: str) -> AdapterSource | None:
    """Return the plug-in for URLs of a scheme; None if there is none.

    Schemes of fsspec are never replaced.

    Args:
        scheme: the scheme in lower case.

    Raises:
        AdapterError: the plug-in cannot be used.
    """
    if scheme in ("http", "https", *fsspec.available_protocols()):
        return None
    try:
        plugin = plugins.find(GROUP, scheme, "adapter source")
        found = None if plugin is None else plugin.load("adapter source")()
    except ConfigError as error:
        raise AdapterError(str(error)) from error
    if found is not None and not isinstance(found, AdapterSource):
        raise AdapterError(f"adapter source {plugin}: expected a subclass of AdapterSource, not {type(found).__name__}")
    return found
