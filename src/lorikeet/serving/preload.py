"""Registers the adapters that the settings name when a server starts."""

from collections.abc import Callable, Sequence
from functools import partial

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterError
from lorikeet.config import AdapterDirMode, AdapterSettings, ConfigError
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread


async def preload_adapters(catalog: AdapterCatalog, pairs: Sequence[str], show: Callable[[int, int], None]) -> None:
    """Register the adapters named in the settings. A version that was loaded under such a name earlier is not served.

    Args:
        catalog: where to.
        pairs: ``name=source``.
        show: called with how many are done, and how many there are.

    Raises:
        ConfigError: one of them cannot be registered.
    """
    for done, pair in enumerate(pairs):
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise ConfigError(f"adapter {pair!r}: not of the form name=source")
        show(done, len(pairs))
        try:
            loaded = await in_daemon_thread(partial(catalog.register, name, source, replace=True, trusted=True))
        except AdapterError as error:
            where = "" if str(error).startswith(f"{source}: ") else f" from {source}"
            raise ConfigError(f"adapter {name!r}{where}: {error}") from error
        for warning in loaded.warnings:
            log.warning("adapter warning", adapter=name, warning=warning)
        if loaded.replaced is not None:
            log.warning(
                "adapter loaded as the settings say; another version, loaded at run time, is not served",
                adapter=name,
                source=source,
                not_served=loaded.replaced.source,
            )
        show(done + 1, len(pairs))


def names_to_show(catalog: AdapterCatalog, pairs: Sequence[str]) -> list[str]:
    """Return the names of all adapters: first those of the settings' ``name=source``, then the others, oldest first."""
    named = (pair.partition("=")[0] for pair in pairs)
    return list(dict.fromkeys([*named, *catalog.names()]))


def served_when_named(settings: AdapterSettings) -> dict[str, str]:
    """Return as a field of the log which adapters are registered only once a request names them; {} if none are."""
    served = settings.adapter_dir and settings.adapter_dir_mode is AdapterDirMode.SERVE
    places = (*(["--adapter-dir"] if served else []), *(["--adapter-resolver"] if settings.resolvers else []))
    return {"and_when_named": f"all of {' and '.join(places)}"} if places else {}


def log_restored(catalog: AdapterCatalog) -> None:
    """Log which adapters are served because they were loaded at run time before this start."""
    names = [record.name for record in catalog.list() if record.persistent]
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        log.info("adapters loaded at run time before this start are served again", number=len(names), adapters=shown)
