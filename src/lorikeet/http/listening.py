"""Opens the socket of a server at its start, so that a port in use is an error before the model is loaded.

Clients that connect while the model is loaded wait until the server is ready.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from ipaddress import ip_address

import uvicorn

from lorikeet.config import ConfigError
from lorikeet.http.tls import Certificate

BACKLOG = 2048
"""Most connections that wait to be accepted; the kernel's limit may be lower."""


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on a port; 0 picks a free one, and ``::`` includes IPv4.

    SO_REUSEADDR allows a new start while connections of the last server linger. No second server gets the port: Linux
    refuses it while a socket listens there, and lets only one of two that bind at the same moment listen.

    Raises:
        ConfigError: the address belongs to another machine, or the port is in use.
    """
    is_ipv6 = ":" in host
    listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}", error) from error
    return listener


def listen_unix(path: str) -> socket.socket:
    """Open a Unix socket that listens, and replace an unused socket at the same path.

    Raises:
        ConfigError: another server listens there, the path is another file, or the socket cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(path, error) from error
    return listener


def _is_left_behind(path: str) -> bool:
    """Return whether a path is a Unix socket that no server listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # A server whose backlog is full is alive.
        return probe.connect_ex(path) == errno.ECONNREFUSED


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server at an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ListeningServer(uvicorn.Server):
    """Runs uvicorn on a socket of :func:`listen` or :func:`listen_unix`.

    Args:
        config: uvicorn's settings without the address.
        listener: the socket; the file of a Unix socket is removed at the end.
        certificate: the certificate for TLS; None for plain HTTP.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, certificate: Certificate | None = None) -> None:
        super().__init__(config)
        self._listener = listener
        self._certificate = certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup([self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket, and end the connections."""
        if self._listener.family == socket.AF_UNIX:
            with suppress(FileNotFoundError):
                os.unlink(self._listener.getsockname())
        await super().shutdown(sockets)


def _cannot_listen(where: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}")
