"""A PostgreSQL server of our own, where its programs are installed."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _program(name: str) -> str | None:
    """Where a program of PostgreSQL lies; Debian keeps them off the search path."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda file: int(file.parts[4]))
    return shutil.which(name) or (str(debian[-1]) if debian else None)


def _user() -> str | None:
    """PostgreSQL refuses to run as root: who runs it then."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """A server with an empty database, stopped at first.

    Args:
        home: folder for its data; given to the user that it runs as.

    Attributes:
        url: of the database.

    Raises:
        FileNotFoundError: its programs are not installed.
    """

    def __init__(self, home: Path) -> None:
        initdb, control = _program("initdb"), _program("pg_ctl")
        if initdb is None or control is None:
            raise FileNotFoundError("PostgreSQL's initdb and pg_ctl are not installed")
        self._home, self._control, self._user = home, control, _user()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"postgresql://lorikeet@127.0.0.1:{self._port}/postgres"
        if self._user is not None:
            shutil.chown(home, self._user)
        self._run(initdb, "-D", f"{home}/data", "-U", "lorikeet", "--auth=trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Start it, and return when it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -k {self._home} -F"
        self._run(self._control, "-D", f"{self._home}/data", "-l", f"{self._home}/log", "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once; whoever is connected is cut off."""
        self._run(self._control, "-D", f"{self._home}/data", "-m", "immediate", "-w", "stop")

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, user=self._user, cwd=self._home, capture_output=True, text=True, timeout=120)
        if done.returncode:
            log = self._home / "log"
            raise RuntimeError(f"{command}: {done.stderr}{log.read_text() if log.exists() else ''}")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Yield a running server, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-postgres-") as home:
        server = PostgresServer(Path(home))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of an empty database, on a server that is stopped at the end."""
    try:
        with postgres_server() as server:
            yield server.url
    except FileNotFoundError as error:
        pytest.skip(str(error))
