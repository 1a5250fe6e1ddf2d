"""Starts the engine process and, while it imports its libraries, imports the server and runs it."""

from collections.abc import Callable

from lorikeet.client.supervisor import LocalHost
from lorikeet.config import Settings
from lorikeet.core.process_tuning import collect_no_garbage


def launch(settings: Settings, name_settings: Callable[[str], str] = str) -> None:
    """Serve until a signal (``run.serve``, which has the arguments).

    Raises:
        SystemExit: with code 1 if the server cannot start, the reason printed or, with ``log_json``, logged.
    """
    collect_no_garbage()
    host = LocalHost()
    try:
        if settings.cluster.is_one_engine:
            host.start_early()  # torch takes longer to import than all that this process needs
        from lorikeet.api.run import serve

        serve(settings, name_settings, host)
    finally:
        host.close()
