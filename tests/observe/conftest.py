"""A server over a scripted engine, for every test of the folder."""

from tests.support.api_server import server, sources, start  # noqa: F401 - fixtures
