"""Runs the command ``lorikeet``. Starts a server's engine process before all other imports."""

import sys

from lorikeet.client.local_host import close_first_host, start_first_host

_INTERRUPTED = 130
"""Status of a command that SIGINT ended, as shells report it."""


def main() -> None:
    """Run the command with the process's arguments."""
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help"}.intersection(sys.argv):
        start_first_host()
    try:
        from lorikeet.cli.app import run

        run()
    except KeyboardInterrupt:  # Ctrl-C while modules are imported; later the commands handle it.
        sys.exit(_INTERRUPTED)
    finally:
        close_first_host()


if __name__ == "__main__":
    main()
