"""Fetching of URLs that strangers name."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yarl
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.http import url_fetcher
from lorikeet.http.url_fetcher import FetchError, UrlFetcher, is_public

LETTERS = st.text(st.sampled_from("/\\@:?#[]%;.&= \t\n\0\x01\x7f\u3002\uff0f\u2048\u00ad0a5cA"), max_size=6)


@asynccontextmanager
async def site(**answers: dict[str, Any]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve answers by path, and list the paths that were requested."""
    seen: list[str] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        seen.append(request.path)
        found = answers.get(request.path.strip("/").replace("/", "_"), {"status": 404})
        return web.Response(**found)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}", seen
    finally:
        await runner.cleanup()


async def test_an_allowed_url_is_fetched() -> None:
    async with site(open_a={"body": b"image"}) as (root, _):
        assert await UrlFetcher([f"{root}/open/"], 100, 5.0).fetch(f"{root}/open/a") == b"image"
        assert await UrlFetcher([f"{root}/open"], 100, 5.0).fetch(f"{root}/open/a?size=3") == b"image"


@pytest.mark.parametrize(
    "path",
    ["/a", "/opened/a", "/open/../a", "/open/%2e%2e/a", "/open/%252e%252e/a", "/open/..%5ca", "//open/a"],
)
async def test_nothing_beside_an_allowed_prefix_is_fetched(path: str) -> None:
    async with site(a={"body": b"secret"}) as (root, seen):
        with pytest.raises(FetchError, match=r"is not fetched from 127\.0\.0\.1"):
            await UrlFetcher([f"{root}/open/"], 100, 5.0).fetch(root + path)
        assert not seen


@pytest.mark.parametrize(
    "url",
    [
        *(
            "file:///etc/passwd",
            "ftp://example.org/a",
            "gopher://example.org/a",
            "data",
            "",
            "https://",
            "//example.org",
        ),
        *("https://[::1", "https://example.org:port/a"),
    ],
)
async def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(FetchError, match=r"must be|is not a URL"):
        await UrlFetcher(["example.org"], 100, 5.0).fetch(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/a", "http://localhost/a", "http://169.254.169.254/latest/meta-data/", "http://[::1]/a"),
        *("http://2130706433/a", "http://0x7f.1/a", "http://127.1/a", "http://example.org.evil.net/a"),
        *("http://example.org:8080/a", "http://evil.net#example.org", "http://evil.net?example.org"),
    ],
)
async def test_no_host_but_the_allowed_ones_is_connected(url: str) -> None:
    with pytest.raises(FetchError, match="is not fetched from"):
        await UrlFetcher(["example.org"], 100, 5.0).fetch(url)


async def test_a_user_name_cannot_hide_the_host() -> None:
    with pytest.raises(FetchError, match="must have no user name"):
        await UrlFetcher(["example.org"], 100, 5.0).fetch("https://example.org@evil.net/a")


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "fd00::1", "100.100.1.1"])
async def test_a_name_that_leads_into_a_network_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    async def resolved(*_: object, **__: object) -> list[object]:
        return [(family, socket.SOCK_STREAM, 6, "", (address, 443))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved, raising=False)
    with pytest.raises(FetchError, match=r"example.org has an address inside a network"):
        await UrlFetcher(["example.org"], 100, 5.0).fetch("https://example.org/a")


async def test_a_name_is_resolved_once_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose address changes between the check and the connection, or at a redirect, leads nowhere inside."""
    asked: list[str] = []
    moved = {"a": {"status": 302, "headers": {"Location": "http://example.org/b"}}, "b": {"body": b"secret"}}
    async with site(**moved) as (root, seen):
        port = int(root.rpartition(":")[2])

        async def resolved(host: str, *_: object, **__: object) -> list[object]:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        # The first answer is called public, as that of a name server which then changes its mind.
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved, raising=False)
        monkeypatch.setattr(url_fetcher, "is_public", lambda _: len(asked) == 1)
        allowed = [f"http://example.org:{port}/", "example.org"]
        with pytest.raises(FetchError, match=r"example.org has an address inside a network"):
            await UrlFetcher(allowed, 100, 5.0).fetch(f"http://example.org:{port}/a")
        assert asked == ["example.org", "example.org"]
        assert seen == ["/a"]


@given(before=LETTERS, host=st.sampled_from(("example.org", "evil.net")), between=LETTERS, after=LETTERS)
def test_the_checked_host_is_the_host_that_is_connected(before: str, host: str, between: str, after: str) -> None:
    """The check and aiohttp read a URL with different parsers."""
    url = f"{before}http://{host}{between}@evil.net{after}"
    try:
        UrlFetcher(["example.org"], 100, 5.0)._check(url)
    except FetchError:
        return
    try:
        read = yarl.URL(url)
    except ValueError:
        return  # aiohttp refuses it, too.
    assert (read.host, read.port) == ("example.org", 80)


async def test_a_redirect_may_lead_to_an_allowed_place_only() -> None:
    async with site(private={"body": b"secret"}) as (inside, seen):
        moved = {
            "open_a": {"status": 302, "headers": {"Location": "/open/b"}},
            "open_b": {"body": b"image"},
            "open_out": {"status": 302, "headers": {"Location": f"{inside}/private"}},
            "open_up": {"status": 301, "headers": {"Location": "/private"}},
            "open_file": {"status": 307, "headers": {"Location": "file:///etc/passwd"}},
            "open_round": {"status": 308, "headers": {"Location": "/open/round"}},
        }
        async with site(**moved) as (root, _):
            fetcher = UrlFetcher([f"{root}/open/"], 100, 5.0)
            assert await fetcher.fetch(f"{root}/open/a") == b"image"
            for path, reason in (
                ("out", "is not fetched from"),
                ("up", "is not fetched from"),
                ("file", "must be a data: URL"),
                ("round", "more than 3 redirects"),
            ):
                with pytest.raises(FetchError, match=reason):
                    await fetcher.fetch(f"{root}/open/{path}")
            assert not seen


async def test_size_time_and_status_are_limited() -> None:
    async with site(large={"body": bytes(101)}, packed={"body": bytes(90)}) as (root, _):
        fetcher = UrlFetcher([root], 100, 5.0)
        with pytest.raises(FetchError, match="has more than 100 bytes"):
            await fetcher.fetch(f"{root}/large")
        with pytest.raises(FetchError, match="answered with the status 404"):
            await fetcher.fetch(f"{root}/none")
        with pytest.raises(FetchError, match=r"was not fetched within 0 s"):
            await UrlFetcher([root], 100, 0.0).fetch(f"{root}/packed")


async def test_an_unreachable_server_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FetchError, match="cannot be fetched: ClientConnectorError"):
            await UrlFetcher([root], 100, 5.0).fetch(f"{root}/a")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
        ("::7f00:1", False),
        ("::ffff:0:7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("fec0::1", False),
        ("fd00:ec2::254", False),
        ("4000::1", False),
        ("ff0e::1", False),
        ("100.100.100.200", False),
        ("192.0.0.192", False),
        ("168.63.129.16", False),
        ("255.255.255.255", False),
        ("no address", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected
