"""Reads adapters from OCI registries, as ``oras push registry/repository:tag adapter_config.json …`` stores them.

Each file is a layer whose title is the file's name. The manifest is checked against the digest in the URL, if any, and
each file against the digest in the manifest. Credentials are those of ``docker login``.

Specification: https://github.com/opencontainers/image-spec/blob/main/manifest.md
"""

import hashlib
import io
import ipaddress
import json
from typing import Any, BinaryIO

import oras.container
import oras.provider

from lorikeet.adapters.source_plugin import AdapterSource

_TITLE = "org.opencontainers.image.title"
_ACCEPT = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_MAX_MANIFEST_BYTES = 4 * 2**20


class OciSource(AdapterSource):
    """Reads ``oci://registry/repository:tag``, or ``@sha256:…`` for an exact version."""

    def __init__(self) -> None:
        self._layers: dict[str, dict[str, str]] = {}

    def open(self, url: str, name: str) -> BinaryIO:
        """Open a layer by its title; see ``AdapterSource.open``."""
        container = oras.container.Container(url.partition("://")[2])
        registry = oras.provider.Registry(hostname=container.registry, insecure=_is_local(container.registry))
        registry.auth.load_configs(container)
        layers = self._layers.get(url)
        if layers is None:
            layers = self._layers[url] = _layers(registry, container, url)
        digest = layers.get(name)
        if digest is None:
            raise FileNotFoundError(f"the manifest has no layer with the title {name}; it has {_some(layers)}")
        return io.BufferedReader(_Checked(_get(registry, container.get_blob_url(digest), name), digest))


class _Checked(io.RawIOBase):
    """Reads a body and compares its digest at the end.

    Args:
        response: the streamed answer.
        digest: the expected digest, with its algorithm.
    """

    def __init__(self, response: Any, digest: str) -> None:
        self._response = response
        self._expected = digest
        self._hash = hashlib.new(digest.partition(":")[0])

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; raise OSError at the end if the content has another digest."""
        data: bytes = self._response.raw.read(len(buffer), decode_content=True)
        buffer[: len(data)] = data
        self._hash.update(data)
        if not data and self._hash.hexdigest() != self._expected.partition(":")[2]:
            raise OSError(f"the content has the digest {self._hash.hexdigest()}, the manifest says {self._expected}")
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        super().close()


def _layers(registry: Any, container: Any, url: str) -> dict[str, str]:
    """Return the digests of the layers by title."""
    response = _get(registry, container.manifest_url(), "the manifest")
    content: bytes = response.raw.read(_MAX_MANIFEST_BYTES + 1, decode_content=True)
    response.close()
    if len(content) > _MAX_MANIFEST_BYTES:
        raise OSError(f"its manifest is larger than {_MAX_MANIFEST_BYTES} bytes")
    if container.digest:
        algorithm, _, expected = container.digest.partition(":")
        found = hashlib.new(algorithm, content).hexdigest()
        if found != expected:
            raise OSError(f"its manifest has the digest {algorithm}:{found}, not {container.digest}")
    try:
        manifest = json.loads(content)
        layers = {layer.get("annotations", {}).get(_TITLE, ""): layer["digest"] for layer in manifest["layers"]}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise OSError(f"{url}: its manifest lists no layers; an index of several images is not read") from error
    layers.pop("", None)
    if not layers:
        raise OSError("its layers have no titles; push the files of the adapter with `oras push`")
    return layers


def _get(registry: Any, address: str, what: str) -> Any:
    try:
        response = registry.do_request(f"{registry.prefix}://{address}", "GET", {"Accept": _ACCEPT}, stream=True)
    except ValueError as error:
        raise OSError(f"the registry refused {what}; `docker login` or `oras login` may help: {error}") from error
    if response.status_code == 404:
        raise FileNotFoundError(f"the registry has no such repository, tag or file ({what})")
    if response.status_code != 200:
        raise OSError(f"the registry refused {what} with status {response.status_code}")
    return response


def _is_local(registry: str) -> bool:
    """Return whether a registry is on this machine; like Docker, plain HTTP is used for it."""
    host = registry.rpartition(":")[0] or registry
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _some(layers: dict[str, str]) -> str:
    return ", ".join(sorted(layers)[:5])
