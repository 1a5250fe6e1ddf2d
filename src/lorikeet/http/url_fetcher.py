"""Fetches files from the web for requests, only where the operator allows it and never from inside the network.

A request names a URL, and the server connects to it, so that a stranger could reach what only the server can: services
of the same machine, of the cluster, or a cloud's metadata address. The rules: a URL must be below an allowed host or
prefix; its host's addresses must be public, unless the operator has named the address itself; each redirect is checked
again; size and time are limited.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

_MAX_REDIRECTS = 3
_CHUNK_BYTES = 2**16
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EMBEDDED_V4 = ipaddress.ip_network("64:ff9b::/96")
"""Prefix of IPv6 addresses that a translator connects to the IPv4 address in their last bytes (RFC 6052)."""
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses that are assigned for the internet. Others are local or reserved, such as ``::7f00:1``."""
_INSIDE_V4 = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
"""IPv4 addresses that ``ipaddress`` calls global, at least in some versions of Python, although they lead to something
inside: to the host of a virtual machine at Azure and Oracle, and to relays for IPv6."""


class FetchError(ValueError):
    """Raised if a URL is not fetched. The message continues the name of the URL's field."""


class UrlFetcher:
    """Fetches URLs below the allowed prefixes.

    Args:
        allowed: hosts, for their ports 80 and 443, or URL prefixes such as ``https://example.org/images/``.
        max_bytes: largest file.
        timeout_s: most seconds for a file, redirects included.
    """

    def __init__(self, allowed: Sequence[str], max_bytes: int, timeout_s: float) -> None:
        self._allowed = tuple(allowed)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def fetch(self, url: str) -> bytes:
        """Return the content of a URL.

        Raises:
            FetchError: the URL is not allowed, or cannot be fetched within the limits.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(url)
        except TimeoutError as error:
            raise FetchError(f"was not fetched within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise FetchError(f"cannot be fetched: {type(error).__name__}") from error

    async def _fetch(self, url: str) -> bytes:
        self._check(url)
        connector = aiohttp.TCPConnector(resolver=_PublicResolver(), use_dns_cache=False)
        # The environment's proxies are not used: they would resolve names themselves.
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False) as session:
            for _ in range(_MAX_REDIRECTS + 1):
                headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "lorikeet"}
                async with session.get(url, allow_redirects=False, headers=headers) as answer:
                    if answer.status in (301, 302, 303, 307, 308) and "location" in answer.headers:
                        url = urljoin(url, answer.headers["location"])
                        self._check(url)
                        continue
                    if answer.status != 200:
                        raise FetchError(f"cannot be fetched: its server answered with the status {answer.status}")
                    return await self._content(answer)
        raise FetchError(f"leads to more than {_MAX_REDIRECTS} redirects")

    async def _content(self, answer: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._max_bytes:
                raise FetchError(f"has more than {self._max_bytes} bytes")
        return bytes(content)

    def _check(self, url: str) -> None:
        """Check that a URL is below an allowed prefix.

        Raises:
            FetchError: it is not.
        """
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018 - reading it checks it
        except ValueError as error:
            raise FetchError(f"is not a URL: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise FetchError("must be a data: URL, or an https:// URL that the server allows")
        if parts.username is not None or any(letter in url for letter in "\\\0\r\n\t "):
            raise FetchError("must have no user name, backslashes or spaces")
        if not any(_is_below(parts, prefix) for prefix in self._allowed):
            raise FetchError(
                f"is not fetched from {parts.hostname[:100]}: send a data: URL, or start the server with "
                "--allowed-media-domains"
            )


def _is_below(url: SplitResult, prefix: str) -> bool:
    port = url.port or _DEFAULT_PORTS[url.scheme]
    if "://" not in prefix:
        return url.hostname == prefix.lower() and port == _DEFAULT_PORTS[url.scheme]
    allowed = urlsplit(prefix)
    if (url.scheme, url.hostname) != (allowed.scheme, allowed.hostname):
        return False
    if port != (allowed.port or _DEFAULT_PORTS.get(allowed.scheme)):
        return False
    folder = allowed.path if allowed.path.endswith("/") else allowed.path + "/"
    # Servers decode a path before they resolve its dots.
    decoded = unquote(unquote(url.path))
    return ".." not in decoded.split("/") and "\\" not in decoded and (url.path + "/").startswith(folder)


class _PublicResolver(AbstractResolver):
    """Resolves names to public addresses only. It is not called for an address, which must be allowed itself."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            FetchError: one of them is not public.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, place in found:
            address = str(place[0])
            if not is_public(address):
                raise FetchError(f"is not fetched: {host} has an address inside a network")
            results.append(
                ResolveResult(
                    hostname=host, host=address, port=port, family=kind, proto=protocol, flags=socket.AI_NUMERICHOST
                )
            )
        return results

    async def close(self) -> None:
        """Release nothing."""


def is_public(address: str) -> bool:
    """Return whether an IP address is reachable on the internet, also if it contains another address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _EMBEDDED_V4:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        return ip in _PUBLIC_V6 and ip.is_global
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _INSIDE_V4)
