"""Starting Ray on this machine, or joining a Ray cluster that is there."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lorikeet.core.extras import install_command

OBJECT_STORE_BYTES = 512 * 2**20
"""Of an embedded Ray: adapters on their way are all that it holds, and what does not fit goes over the disk."""

_LISTENS_WITHIN_S = 10.0

_EMBEDDED = {
    "RAY_prestart_worker_first_driver": "0",  # every actor gets a process with an environment of its own
    "RAY_memory_monitor_refresh_ms": "0",  # engines fill memory as planned, and are not to be killed for it
}


class RayError(OSError):
    """Ray cannot be had, or does not do what it was asked; the message says what to do."""


class RayInfo(NamedTuple):
    """The Ray cluster that this process is part of.

    Attributes:
        address: of its head node.
        node_ip: of this machine, as the others see it.
        is_embedded: it was started here, for this process alone, and ends with it.
    """

    address: str
    node_ip: str
    is_embedded: bool


def start_ray(address: str = "", cpus: int | None = None) -> RayInfo:
    """Start Ray, or join one. Handlers of SIGTERM and SIGINT stay as they are.

    Args:
        address: of the head node of a cluster that this machine is part of (``host:port``, or ``auto`` for the one that
            runs here); empty to start Ray on this machine.
        cpus: how many Ray gives out when it is started here, whatever there are; None for those that there are.

    Raises:
        RayError: it is not installed, does not start, or cannot be joined.
    """
    ray = _installed()
    if "://" in address:
        raise RayError(
            f"{address}: Ray's client protocol carries no tokens between replicas and this process; run Lorikeet on a "
            f"machine of the cluster, and give the address as host:port"
        )
    if ray.is_initialized():
        raise RayError("Ray runs in this process already")
    embedded = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    if not address:
        for name, value in _EMBEDDED.items():
            os.environ.setdefault(name, value)
        # It warns that it asks for a token, which is as it should be.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    elif address != "auto":
        _check_listened(address)
    try:
        with _signal_handlers_kept():
            context = ray.init(
                address=address or "local",
                logging_level=logging.WARNING,
                log_to_driver=True,  # what engines write to their standard error
                **({} if address else embedded),
            )
    except Exception as error:  # Ray raises all kinds, plain ones included
        ray.shutdown()
        reason = str(error) or type(error).__name__
        if "InvalidAuthToken" in str(error.__cause__):
            raise RayError(
                f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, with the cluster's token in "
                f"RAY_AUTH_TOKEN or in ~/.ray/auth_token"
            ) from error
        raise _not_joined(address, reason) if address else RayError(f"Ray cannot be started here: {reason}") from error
    return RayInfo(context.address_info["address"], ray.util.get_node_ip_address(), not address)


def stop_ray() -> None:
    """Leave the cluster; an embedded one ends, and all actors of this process in any case."""
    _installed().shutdown()


def _check_listened(address: str) -> None:
    """Raise if nobody listens at an address: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_LISTENS_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise _not_joined(address, str(error)) from error


def _not_joined(address: str, reason: str) -> RayError:
    return RayError(
        f"no Ray cluster can be joined at {address}: {reason}; is it host:port of the head node, and does `ray start` "
        f"run on this machine, with the same versions of Python and Ray?"
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
    """Put handlers back that Ray replaces: a server drains on SIGTERM, where Ray exits at once."""
    if threading.current_thread() is not threading.main_thread():  # Ray leaves them alone, then
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be put back
                signal.signal(number, handler)
