"""Registers the adapters that the settings name when a server starts."""

from collections.abc import Callable, Sequence
from functools import partial

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterError
from lorikeet.config import AdapterDirMode, AdapterSettings, ConfigError
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread


async def preload_adapters(catalog: AdapterCatalog, pairs: Sequence[str], show: Callable[[int, int], None]) -> None:
    """Register the adapters in the settings. They replace adapters of the same names that were loaded at run time.

    Args:
        catalog: the catalog that registers the adapters.
        pairs: the adapters as ``name=source``.
        show: function that is called with the number of registered adapters and the number of all.

    Raises:
        ConfigError: an adapter cannot be registered.
    """
    for done, pair in enumerate(pairs):
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise ConfigError(f"adapter {pair!r}: must have the form name=source")
        show(done, len(pairs))
        located = catalog.locate(source, trusted=True)
        try:
            loaded = await in_daemon_thread(partial(catalog.register, name, located, replace=True, trusted=True))
        except AdapterError as error:
            where = "" if str(error).startswith(f"{source}: ") else f" from {source}"
            if located != source:
                where = f": there is no folder {source!r}, and the Hub could not be read"
            raise ConfigError(f"adapter {name!r}{where}: {error}") from error
        for warning in loaded.warnings:
            log.warning("adapter warning", adapter=name, warning=warning)
        if loaded.replaced is not None:
            log.warning(
                "adapter loaded from the settings; it replaces a version that was loaded at run time",
                adapter=name,
                source=source,
                not_served=loaded.replaced.source,
            )
        show(done + 1, len(pairs))


def names_to_show(catalog: AdapterCatalog, pairs: Sequence[str]) -> list[str]:
    """Return the names of all adapters: first the adapters in the settings, then the others, oldest first."""
    named = (pair.partition("=")[0] for pair in pairs)
    return list(dict.fromkeys([*named, *catalog.names()]))


def served_when_named(settings: AdapterSettings) -> dict[str, str]:
    """Return the log's field on adapters that are registered when a request names them; {} without such adapters."""
    served = settings.adapter_dir and settings.adapter_dir_mode is AdapterDirMode.SERVE
    places = (*(["--adapter-dir"] if served else []), *(["--adapter-resolver"] if settings.resolvers else []))
    return {"and_when_named": f"all of {' and '.join(places)}"} if places else {}


def log_restored(catalog: AdapterCatalog) -> None:
    """Log the adapters that were loaded at run time before this start and are served again."""
    names = [record.name for record in catalog.list() if record.persistent]
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        log.info("adapters loaded at run time before this start are served again", number=len(names), adapters=shown)
