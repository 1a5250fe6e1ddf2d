"""Imports the server and runs it, while the engine process imports its libraries."""

from collections.abc import Callable

from lorikeet.client.local_host import first_host
from lorikeet.config import Settings
from lorikeet.core.process_tuning import collect_no_garbage, freeze_imports, unfreeze_imports


def launch(settings: Settings, name_settings: Callable[[str], str] = str) -> None:
    """Serve until a signal; see ``run.serve`` for the arguments.

    Raises:
        SystemExit: with code 1 if the server cannot start, the reason printed or, with ``log_json``, logged.
    """
    collect_no_garbage()
    host = first_host()  # Importing torch takes longer than importing all that this process needs.
    try:
        from lorikeet.api.run import serve

        freeze_imports()
        serve(settings, name_settings, host)
    finally:
        unfreeze_imports()
        host.close()
