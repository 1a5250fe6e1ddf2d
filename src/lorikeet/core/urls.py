"""Addresses of servers."""


def server_root(url: str) -> str:
    """Return where a server's routes begin, also for the base URL that OpenAI's clients want, which ends in /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
