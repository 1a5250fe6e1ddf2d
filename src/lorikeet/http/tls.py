"""Serves TLS with a certificate that is read again when its files change."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from lorikeet.config import ConfigError
from lorikeet.http.logs import log

_LOOK_EVERY_S = 10.0

_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """Certificate and key of new connections, for TLS 1.2 and later with Python's choice of ciphers.

    Args:
        cert_file: PEM file of the certificate, followed by the certificates of authorities below the root.
        key_file: PEM file of its key, without a password; empty if the key is in ``cert_file``.

    Attributes:
        context: TLS context of the server's sockets.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """

    def __init__(self, cert_file: str, key_file: str = "") -> None:
        self._files = (cert_file, key_file or cert_file)
        try:
            self._stamp = self._look()
            self.context = _new_context(*self._files)
        except OSError as error:  # ssl.SSLError is an OSError, too.
            raise ConfigError(self._describe(error)) from error

    def renew(self) -> None:
        """Read the files again if they have changed; log a pair that cannot be used, and keep the last good one."""
        try:
            if (stamp := self._look()) == self._stamp:
                return
            self._stamp = stamp
            # Loading a wrong pair into the context in use would leave it without a certificate.
            _new_context(*self._files)
            self.context.load_cert_chain(*self._files)
        except OSError as error:
            log.warning("the new certificate cannot be used; the last one stays", reason=self._describe(error))
        else:
            log.info("certificate renewed", file=self._files[0])

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Look for changed files every ten seconds."""
        task = asyncio.create_task(self._renew_for_ever())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.renew()

    def _look(self) -> _Stamp:
        found = (os.stat(file) for file in self._files)  # stat follows links, which Kubernetes replaces.
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)

    def _describe(self, error: OSError) -> str:
        """Return the text of an error, with the flags of the files."""
        flags = {self._files[1]: "--ssl-keyfile", self._files[0]: "--ssl-certfile"}
        if isinstance(error, ssl.SSLError):
            files = " and ".join(f"{flag} {file}" for file, flag in reversed(flags.items()))
            return f"{files}: {error.reason or 'it is not a certificate and key in PEM without a password'}"
        return f"{flags.get(error.filename, '--ssl-certfile')} {error.filename}: {error.strerror}"


def open_certificate(cert_file: str, key_file: str) -> Certificate | None:
    """Return the certificate that ``--ssl-certfile`` and ``--ssl-keyfile`` name; None without them.

    Raises:
        ConfigError: the certificate cannot be used, or a key is named without one.
    """
    if key_file and not cert_file:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    return Certificate(cert_file, key_file) if cert_file else None


def _new_context(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The empty password makes a protected key an error; OpenSSL would prompt for a password on the terminal.
    context.load_cert_chain(cert_file, key_file, password=str)
    context.set_alpn_protocols(["http/1.1"])
    return context
