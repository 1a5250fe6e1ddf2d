"""Reads addresses of servers."""


def server_root(url: str) -> str:
    """Return the root of a server's routes. A base URL for OpenAI clients, which ends in /v1, is accepted too."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unix_socket(url: str) -> str:
    """Return the path in ``unix:/path``, which `lorikeet serve --uds` prints as its URL; empty for any other URL."""
    return url.removeprefix("unix:") if url.startswith("unix:") else ""
