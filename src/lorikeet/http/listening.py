"""The socket that a server listens on: bound at the start, so that a port in use is an error before anything heavy."""

import errno
import os
import socket
import stat
from contextlib import suppress
from ipaddress import ip_address

import uvicorn

from lorikeet.config import ConfigError
from lorikeet.http.tls import Certificate


def bind(host: str, port: int) -> socket.socket:
    """Bind a port so that a second server that starts meanwhile cannot.

    SO_REUSEADDR, which a restart needs while old connections linger, would let both bind. It is set only if the port
    cannot be bound without it, and not kept; :class:`BoundServer` sets it again once it listens.

    Raises:
        ConfigError: the address or port cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        try:
            listener.bind((host, port))
        except OSError:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise _cannot_listen(f"{host}:{port}", error) from error
    return listener


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket, in the place of one that nobody listens on.

    Raises:
        ConfigError: it cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listener.close()
        raise _cannot_listen(path, error) from error
    return listener


def _is_left_behind(path: str) -> bool:
    """Whether there is a Unix socket on which nobody listens any more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a server at that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BoundServer(uvicorn.Server):
    """Uvicorn on a socket of :func:`bind`.

    Args:
        config: the socket's address is not taken from it.
        listener: bound; a Unix socket is removed in the end.
        certificate: for TLS; None for none.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, certificate: Certificate | None = None) -> None:
        super().__init__(config)
        self._listener = listener
        self._certificate = certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen.

        Raises:
            ConfigError: another server listens on the port.
        """
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        try:
            self._listener.listen(
                self.config.backlog
            )  # uvloop would close a socket that cannot listen, and not say why
        except OSError as error:
            address = self._listener.getsockname()
            raise _cannot_listen(address if isinstance(address, str) else "{}:{}".format(*address), error) from error
        await super().startup([self._listener])
        if self._listener.family != socket.AF_UNIX:
            # Connections inherit it, and a restart can bind while they linger.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more."""
        if self._listener.family == socket.AF_UNIX:
            with suppress(FileNotFoundError):
                os.unlink(self._listener.getsockname())
        await super().shutdown(sockets)


def _cannot_listen(where: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}")
