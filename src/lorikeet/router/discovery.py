"""Finds the backends of a router: fixed addresses, names in DNS, lines of a file, endpoints of a Kubernetes service."""

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lorikeet.http.logs import log
from lorikeet.router.apis import BackendSpec, parse_backend

EVERY_S = 5.0
"""Seconds between two searches."""
_ANSWER_S = 10.0
_SCHEME = "https"
"""Scheme of the API server."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in a pod with the pod's token and the API server's certificates."""

Find = Callable[[], Awaitable[list[BackendSpec]]]
"""Returns the current backends; raises ``OSError`` or ``ValueError`` if they cannot be found."""


class DiscoveryError(OSError):
    """A source of backends does not answer. The message names it."""


def open_source(text: str) -> Find:
    """Parse a value of ``--backend`` as a source of backends.

    Args:
        text: an address (``http://host:port``), ``dns://name:port``, ``file:PATH`` with an address in each line, or
            ``kubernetes://namespace/service:port``; all except files may have the options of a backend.

    Raises:
        ValueError: the value has none of these forms.
    """
    if text.startswith("file:"):
        return _File(Path(text.removeprefix("file:").removeprefix("//")))
    spec = parse_backend(text)
    parts = urlsplit(spec.url)
    if parts.scheme == "dns":
        return _Dns(spec, *_host_and_port(text, parts.netloc))
    if parts.scheme == "kubernetes":
        service, port = _host_and_port(text, parts.path.lstrip("/"))
        return _Kubernetes(spec, parts.netloc, service, port)
    return _Fixed(spec)


def _host_and_port(text: str, place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{text}: a name and a port are needed, such as name:8000")
    return host, int(port)


class _Fixed:
    def __init__(self, spec: BackendSpec) -> None:
        self._spec = spec

    async def __call__(self) -> list[BackendSpec]:
        return [self._spec]


class _Dns:
    """Finds the backends at all addresses of a DNS name, such as the name of a headless service."""

    def __init__(self, spec: BackendSpec, host: str, port: int) -> None:
        self._spec = spec
        self._host = host
        self._port = port

    async def __call__(self) -> list[BackendSpec]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                return []  # The name of a headless service without ready pods does not resolve.
            raise DiscoveryError(f"{self._host}: {error.strerror}") from error
        addresses = sorted({str(each[4][0]) for each in found})
        return [self._spec._replace(url=f"{_url(address)}:{self._port}") for address in addresses]


class _File:
    """Reads the backends from the lines of a file, which is read again at each call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self) -> list[BackendSpec]:
        try:
            lines = self._path.read_text().splitlines()
        except OSError as error:
            raise DiscoveryError(f"{self._path}: {error.strerror}") from error
        texts = [line.partition("#")[0].strip() for line in lines]
        found = []
        for text in filter(None, texts):
            if text.startswith("file:"):
                raise ValueError(f"{self._path}: {text}: a file of backends cannot name another file")
            found += await open_source(text)()
        return found


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()


class _Slice(msgspec.Struct):
    endpoints: list[_Endpoint] | None = None


class _Slices(msgspec.Struct):
    items: list[_Slice]


class _Kubernetes:
    """Reads the ready endpoints of a service from Kubernetes' API server, with the account of this pod."""

    def __init__(self, spec: BackendSpec, namespace: str, service: str, port: int) -> None:
        if not namespace:
            raise ValueError(f"{spec.url}: the namespace is missing; write kubernetes://namespace/service:port")
        self._spec = spec
        self._namespace = namespace
        self._service = service
        self._port = port

    async def __call__(self) -> list[BackendSpec]:
        try:
            server = _ApiServer.of_this_pod()
            query = f"labelSelector=kubernetes.io%2Fservice-name%3D{self._service}"
            text = await server.get(f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices?{query}")
            slices = msgspec.json.decode(text, type=_Slices).items
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise DiscoveryError(f"Kubernetes service {self._namespace}/{self._service}: {error}") from error
        ready = [each for one in slices for each in one.endpoints or () if each.conditions.ready is not False]
        addresses = sorted({address for each in ready for address in each.addresses})
        return [self._spec._replace(url=f"{_url(address)}:{self._port}") for address in addresses]


class _ApiServer(NamedTuple):
    url: str
    token: str
    trusts: ssl.SSLContext | bool

    @classmethod
    def of_this_pod(cls) -> "_ApiServer":
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise DiscoveryError("this process does not run in a pod: KUBERNETES_SERVICE_HOST is not set")
        certificates = _ACCOUNT / "ca.crt"
        trusts = ssl.create_default_context(cafile=str(certificates)) if certificates.exists() else True
        return cls(f"{_SCHEME}://{host}:{port}", (_ACCOUNT / "token").read_text().strip(), trusts)

    async def get(self, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(_ANSWER_S)
        headers = {"authorization": f"Bearer {self.token}"}
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(self.url + path, ssl=self.trusts) as reply,
        ):
            text = await reply.read()
            if reply.status != 200:
                raise DiscoveryError(f"{reply.status}: {text[:300].decode(errors='replace')}")
            return text


def _url(address: str) -> str:
    return f"http://[{address}]" if ":" in address else f"http://{address}"


class Discovery:
    """Finds the backends of all sources. If a source does not answer, its last known backends stay.

    Args:
        texts: values of ``--backend``.

    Raises:
        ValueError: a value is not valid.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._sources = [(text, open_source(text)) for text in texts]
        self._found: dict[str, list[BackendSpec]] = {}
        self._failed: dict[str, str] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether all backends are fixed addresses."""
        return all(isinstance(source, _Fixed) for _, source in self._sources)

    async def find(self) -> list[BackendSpec]:
        """Return all backends, each address once."""
        for text, source in self._sources:
            try:
                self._found[text] = await source()
            except (OSError, ValueError) as error:
                if self._failed.get(text) != str(error):
                    log.warning("backends cannot be found", source=text, reason=str(error))
                self._failed[text] = str(error)
            else:
                self._failed.pop(text, None)
        return list({spec.url: spec for found in self._found.values() for spec in found}.values())

    async def first(self) -> list[BackendSpec]:
        """Wait until at least one backend is found, and return all backends."""
        has_told = False
        while not (found := await self.find()):
            if not has_told:
                log.info("waiting for backends", sources=[text for text, _ in self._sources])
            has_told = True
            await asyncio.sleep(EVERY_S)
        return found
