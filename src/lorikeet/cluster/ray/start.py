"""Starts Ray on this machine, or joins a running Ray cluster."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lorikeet.core.text import install_command

OBJECT_STORE_BYTES = 512 * 2**20
"""Size of the object store of an embedded Ray. It holds only adapters in transit; the rest is spilled to disk."""

_CONNECT_TIMEOUT_S = 10.0

_EMBEDDED = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ports listen on loopback only, so they need no key.
    "RAY_prestart_worker_first_driver": "0",  # Every actor gets a separate process and environment.
    "RAY_memory_monitor_refresh_ms": "0",  # Engines fill memory by design, and Ray must not kill them for it.
}


class RayError(OSError):
    """Ray is missing, or an operation on Ray failed. The message names the remedy."""


class RayInfo(NamedTuple):
    """Describes the Ray cluster of this process.

    Attributes:
        address: address of its head node.
        node_ip: address of this machine for the others.
        is_embedded: whether this process started the cluster, which then serves and ends with this process only.
    """

    address: str
    node_ip: str
    is_embedded: bool

    @property
    def peer_host(self) -> str:
        """Address at which the processes of the cluster reach this machine."""
        return "127.0.0.1" if self.is_embedded else self.node_ip


def start_ray(address: str = "", cpus: int | None = None) -> RayInfo:
    """Start Ray, or join a Ray cluster. Handlers of SIGTERM and SIGINT stay as they are.

    Args:
        address: address of the head node of this machine's cluster (``host:port``, or ``auto`` for the local one);
            empty to start Ray on this machine.
        cpus: number of CPUs that Ray assumes if it is started here; None for the machine's number.

    Raises:
        RayError: Ray is not installed, does not start, or cannot be joined.
    """
    ray = _installed()
    if "://" in address:
        raise RayError(
            f"{address}: Ray's client protocol is not supported, because engines connect to this process: run Lorikeet "
            f"on a machine of the cluster and pass the address as host:port"
        )
    if ray.is_initialized():
        raise RayError("Ray is already running in this process")
    embedded = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    if not address:
        for name, value in _EMBEDDED.items():
            os.environ.setdefault(name, value)
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # This process has already read the environment variable.
        # Ray warns that it requires a token, which is intended.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    elif address != "auto":
        _check_listening(address)
    try:
        with _signal_handlers_kept():
            context = ray.init(
                address=address or "local",
                logging_level=logging.WARNING,
                log_to_driver=True,  # Show the standard error of engines.
                **({} if address else embedded),
            )
    except Exception as error:  # Ray raises many kinds of exceptions
        ray.shutdown()
        reason = str(error) or type(error).__name__
        if "InvalidAuthToken" in str(error.__cause__):
            raise RayError(
                f"the Ray cluster at {address} requires a token: set RAY_AUTH_MODE=token, with the cluster's token in "
                f"RAY_AUTH_TOKEN or in ~/.ray/auth_token"
            ) from error
        raise _not_joined(address, reason) if address else RayError(f"Ray cannot be started here: {reason}") from error
    return RayInfo(context.address_info["address"], ray.util.get_node_ip_address(), not address)


def stop_ray() -> None:
    """Leave the cluster. All actors of this process end, and so does an embedded cluster."""
    _installed().shutdown()


def _check_listening(address: str) -> None:
    """Raise an error if no server listens at an address. Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise _not_joined(address, str(error)) from error


def _not_joined(address: str, reason: str) -> RayError:
    return RayError(
        f"cannot join a Ray cluster at {address}: {reason}; check that it is host:port of the head node, and that `ray "
        f"start` runs on this machine with the same versions of Python and Ray"
    )


def _installed() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise RayError(f"a cluster needs Ray: {install_command('cluster')} ({error})") from error
    return ray


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces.

    On SIGTERM a server must drain, but Ray's handler exits immediately.
    """
    if threading.current_thread() is not threading.main_thread():  # Ray sets handlers only in the main thread.
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # A handler that was not set from Python cannot be restored.
                signal.signal(number, handler)
