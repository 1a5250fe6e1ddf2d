"""A PostgreSQL server of our own, where its programs are installed."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of an empty database, on a server that is stopped at the end."""
    initdb, control = _program("initdb"), _program("pg_ctl")
    if initdb is None or control is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    user = _user()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lorikeet-postgres-") as home:
        if user is not None:
            shutil.chown(home, user)

        def run(*command: str) -> None:
            done = subprocess.run(command, user=user, cwd=home, capture_output=True, text=True, timeout=120)
            if done.returncode:
                log = Path(home, "log")
                raise RuntimeError(f"{command}: {done.stderr}{log.read_text() if log.exists() else ''}")

        run(initdb, "-D", f"{home}/data", "-U", "lorikeet", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -k {home} -F"
        run(control, "-D", f"{home}/data", "-l", f"{home}/log", "-w", "-o", options, "start")
        try:
            yield f"postgresql://lorikeet@127.0.0.1:{port}/postgres"
        finally:
            run(control, "-D", f"{home}/data", "-m", "immediate", "-w", "stop")
