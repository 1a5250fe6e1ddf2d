"""The pages that the server has for browsers: offline, under a strict policy, open as far as they show nothing."""

import re

import pytest

from lorikeet.http.web import FILES
from tests.support.api_server import Running, Start


@pytest.mark.slow
@pytest.mark.parametrize("page", ["ui", "docs"])
async def test_page_needs_no_key_and_loads_nothing_from_other_servers(start: Start, page: str) -> None:
    async with start(api_keys=("secret",)) as server:
        reply = await server.http.get(f"/{page}")
        assert reply.status_code == 200
        named = re.findall(r'(?:src|href)="([^"#]+)"', reply.text)
        files = [name for name in named if name.startswith(f"{page}/")]
        assert len(files) >= 4
        for name in files:
            found = await server.http.get(f"/{name}")
            assert found.status_code == 200, name
            again = await server.http.get(f"/{name}", headers={"If-None-Match": found.headers["etag"]})
            assert again.status_code == 304
        assert [name for name in named if "//" in name] == []
        assert "<style" not in reply.text
        assert not re.search(r"<script(?![^>]* src=)", reply.text)
        for closed in ("/v1/stats", "/openapi.json", "/uix"):
            assert (await server.http.get(closed)).status_code == 401
        assert (await server.http.post(f"/{page}")).status_code == 401


async def test_pages_may_run_only_their_own_files(server: Running) -> None:
    for page in ("/ui", "/docs"):
        policy = (await server.http.get(page)).headers["content-security-policy"]
        assert policy == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
    for path in ("/health", "/v1/models", "/v1/nothing"):
        headers = (await server.http.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


async def test_only_files_of_the_pages_are_served(server: Running) -> None:
    for name in ("nothing.js", "..%2fweb.py", "%2e%2e/app.py"):
        assert (await server.http.get(f"/ui/{name}")).status_code == 404
    assert {path.suffix for path in FILES.iterdir()} == {".html", ".js", ".css", ".svg"}


def test_built_files_load_nothing_from_elsewhere() -> None:
    for path in FILES.iterdir():
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text()))
        assert hosts <= {"www.w3.org"}, path.name  # the namespace of SVG


@pytest.mark.slow
async def test_operation_ids_are_different(server: Running) -> None:
    paths = (await server.http.get("/openapi.json")).json()["paths"]
    ids = [each["operationId"] for methods in paths.values() for each in methods.values()]
    assert len(ids) == len(set(ids))
