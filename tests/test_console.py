"""The console in a real browser, against a live server with 40 adapters; and whether its built files are current."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from playwright.async_api import Page, async_playwright, expect

from lorikeet.http.web import FILES
from tests.chat.images import image_file
from tests.router.conftest import adapters, events, routing
from tests.router.scripted import ScriptedBackend
from tests.support.chat_requests import CHAT
from tests.support.documents import ROOT
from tests.support.live import write_adapter
from tests.support.served import Server, make_model, serving
from tests.support.vision_model import make_vision_model
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAMES = [f"customer-{number:02}" for number in range(40)]
SLOW = "customer-17"
PAGES = {
    "overview": "Overview",
    "adapters": "Adapters",
    f"adapters/{NAMES[0]}": NAMES[0],
    "requests": "Requests",
    "replicas": "Replicas",
    "playground": "Playground",
}
"""Paths of the pages, each with its heading."""
PATIENCE_MS = 60_000
"""Far more than anything takes here, since other work may share the machine."""


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium")
    return found


@asynccontextmanager
async def open_page(url: str, width: int = 1280, scheme: str = "light") -> AsyncIterator[tuple[Page, list[str]]]:
    """A page of the server, and what its scripts complained about."""
    complaints: list[str] = []
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as play:
        chromium = await play.chromium.launch(executable_path=browser(), args=options)
        page = await chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        expect.set_options(timeout=PATIENCE_MS)
        await page.goto(url)
        yield page, complaints
        await chromium.close()


def loader_of(server: Server) -> psutil.Process:
    """Return the process that reads adapters' files."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (loader,) = [each for each in children if any("loader_process" in word for word in each.cmdline())]
    return loader


async def ask(server: Server, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert (await server.http.post(CHAT, json=body)).status_code == 200


@asynccontextmanager
async def server_with_adapters(folder: Path) -> AsyncIterator[Server]:
    model = make_model(folder / "tiny")
    # Nothing is read ahead, so that an adapter is read when it is asked for.
    flags = ["--preset", "lorikeet:plain", "--host-memory", "0"]
    for seed, name in enumerate(NAMES):
        flags += ["--lora-modules", f"{name}={write_adapter(folder / 'adapters' / name, model, seed)}"]
    async with serving(model, folder / "home", *flags) as server:
        yield server


async def test_the_console_finds_a_slow_adapter_says_why_removes_it_and_chats(tmp_path: Path) -> None:
    async with (
        server_with_adapters(tmp_path) as server,
        open_page(f"{server.http.base_url}/ui#/adapters") as (page, complaints),
    ):
        for name in NAMES[:4]:
            await ask(server, name)
        await expect(page.locator("tbody tr")).to_have_count(len(NAMES) + 1)
        # What reads adapters stops, so that one waits for its transfer. The others are on the device.
        loader = loader_of(server)
        loader.suspend()
        try:
            waiting = asyncio.create_task(ask(server, SLOW))
            first = page.locator("tbody tr").first
            await expect(first).to_contain_text(SLOW)
            await first.get_by_role("link", name=SLOW).click()
            await expect(page.get_by_role("heading", level=1)).to_have_text(SLOW)
            await expect(page.locator("#why")).to_contain_text("is the transfer of its adapter to the device")
            await expect(page.get_by_text("have no token yet")).to_be_visible()
        finally:
            loader.resume()
        await waiting
        await expect(page.locator("#why")).to_contain_text("the latest load took")
        await page.locator("tbody a").first.click()
        await expect(page.get_by_role("img", name=re.compile("Timeline"))).to_be_visible()
        await _lists_requests(page)
        await page.evaluate(f"location.hash = '#/adapters/{SLOW}'")
        await page.get_by_role("button", name="Pin", exact=True).click()
        await expect(page.get_by_role("button", name="Unpin")).to_be_visible()
        await page.get_by_role("button", name="Remove").click()
        await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Adapters")
        await expect(page.locator("tbody tr")).to_have_count(len(NAMES))
        assert SLOW not in [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]]
        await _sorts_by_keyboard(page)
        await _chats(page)
        await _fits_narrow_screens(page)
        assert complaints == []


async def _lists_requests(page: Page) -> None:
    """The latest are shown, the newest first; one of them leads to its timeline."""
    await page.get_by_role("navigation").get_by_role("link", name="Requests").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Requests")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(5)
    for row, name in enumerate((SLOW, *reversed(NAMES[:4]))):
        await expect(rows.nth(row).get_by_role("link", name=name)).to_be_visible()
    await expect(rows.first).to_contain_text("transfer of its adapter")
    await expect(rows.first).to_contain_text("length")
    await expect(rows.first).to_contain_text(re.compile(r"\d m?s"))
    await rows.first.get_by_role("link").first.click()
    await expect(page.get_by_role("img", name=re.compile("Timeline"))).to_be_visible()


async def _sorts_by_keyboard(page: Page) -> None:
    await page.get_by_role("button", name="Adapter", exact=True).focus()
    await page.keyboard.press("Enter")
    head = page.get_by_role("columnheader", name="Adapter")
    assert await head.get_attribute("aria-sort") == "ascending"
    await expect(page.locator("tbody tr").first).to_contain_text(NAMES[0])
    await page.keyboard.press("Enter")
    assert await head.get_attribute("aria-sort") == "descending"
    await page.get_by_label("Filter").fill("customer-3")
    await expect(page.locator("tbody tr")).to_have_count(10)


async def _chats(page: Page) -> None:
    await page.get_by_role("navigation").get_by_role("link", name="Playground").click()
    await page.get_by_role("button", name="Close tiny").click()
    for name in NAMES[:2]:
        await page.get_by_label("Compare").fill(name)
        await page.get_by_role("button", name="Add").click()
    await expect(page.get_by_label("Images")).to_be_hidden()  # The model reads only text.
    await page.get_by_label("System prompt").fill("You are a parrot.")
    await page.get_by_label("Most tokens").fill("12")
    await page.get_by_label("Message").fill("hello")
    await page.keyboard.press("Control+Enter")
    for name in NAMES[:2]:
        log = page.get_by_role("log", name=f"Conversation with {name}")
        await expect(log.locator(".note")).to_contain_text("tokens in")
        await expect(log.locator(".bad")).to_have_count(0)
    await page.get_by_label("JSON schema of the answer").fill('{"type": "boolean"}')
    await page.get_by_label("Message").fill("yes or no?")
    await page.get_by_role("button", name="Send").click()
    for name in NAMES[:2]:
        log = page.get_by_role("log", name=f"Conversation with {name}")
        await expect(log.locator(".note").nth(1)).to_contain_text("tokens in")
        await expect(log.locator(".text").last).to_have_text(re.compile("true|false"))


async def _fits_narrow_screens(page: Page) -> None:
    await page.set_viewport_size({"width": 400, "height": 800})
    for name, heading in PAGES.items():
        await page.evaluate(f"location.hash = '#/{name}'")
        await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        await expect(page.get_by_text(re.compile("Loading …|Waiting for the first figures"))).to_have_count(0)
        if name == "adapters":
            await expect(page.locator("tbody tr")).not_to_have_count(0)
            await expect(page.get_by_text("Slide the table to the left")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400, name
        unlabelled = "[...document.querySelectorAll('input, textarea')].filter((each) => !each.labels.length).length"
        assert await page.evaluate(unlabelled) == 0, name


async def test_the_playground_sends_images(tmp_path: Path) -> None:
    make_vision_model(tmp_path / "tiny")
    flags = ("--dtype", "float32", "--max-model-len", "128")
    async with (
        serving(tmp_path / "tiny", tmp_path / "home", *flags) as server,
        open_page(f"{server.http.base_url}/ui#/playground") as (page, complaints),
    ):
        log = page.get_by_role("log", name="Conversation with tiny")
        files = [{"name": f"{seed}.png", "mimeType": "image/png", "buffer": image_file(seed=seed)} for seed in range(2)]
        await page.get_by_label("Images").set_input_files(files)
        await expect(page.locator("form .picture")).to_have_count(2)
        await page.get_by_label("Most tokens").fill("4")
        await page.get_by_label("Message").fill("What?")
        await page.get_by_role("button", name="Send").click()
        await expect(log.locator(".note")).to_contain_text("tokens in")
        await expect(log.locator(".bad")).to_have_count(0)
        await expect(log.locator(".asks .picture")).to_have_count(2)
        # The next message has no image of its own, but those of the conversation.
        await expect(page.locator("form .picture")).to_have_count(0)
        await page.get_by_label("Message").fill("And?")
        await page.get_by_role("button", name="Send").click()
        await expect(log.locator(".note").nth(1)).to_contain_text("tokens in")
        await expect(log.locator(".bad")).to_have_count(0)
        assert await page.evaluate(
            "[...document.querySelectorAll('.picture')].every((each) => each.naturalWidth == 24)"
        )
        page_of_metrics = (await server.http.get("/metrics")).text
        assert re.search(r"^lorikeet:images_total\{.*\} 4\.0$", page_of_metrics, re.MULTILINE)
        assert complaints == []


async def test_a_server_with_keys_is_seen_with_its_key(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    async with (
        serving(model, tmp_path / "home", "--api-key", "secret") as server,
        open_page(f"{server.http.base_url}/ui", 400, "dark") as (page, _),
    ):
        await page.get_by_role("dialog").get_by_label("Key").fill("secret")
        await page.get_by_role("button", name="Use").click()
        await expect(page.locator("#state")).to_contain_text("tiny: ready")
        await expect(page.get_by_text("Tokens generated per second")).to_be_visible()
        await page.goto(f"{server.http.base_url}/docs")
        await expect(page.get_by_role("heading", level=1)).to_contain_text("HTTP API 0.")
        await page.get_by_label("Filter").fill("/v1/stats")
        await until(lambda: page.locator("details:visible").count(), "routes are shown")
        assert {await each.inner_text() for each in await page.locator("details:visible summary code").all()} == {
            "/v1/stats",
            "/v1/stats/stream",
        }


async def test_a_key_that_is_no_operators_sees_what_it_may_and_no_buttons(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    adapter = write_adapter(tmp_path / "adapters" / "one", model, 0)
    flags = ("--api-key", "plain", "--admin-key", "boss", "--lora-modules", f"one={adapter}")
    async with (
        serving(model, tmp_path / "home", *flags) as server,
        open_page(f"{server.http.base_url}/ui") as (page, complaints),
    ):
        await page.get_by_role("dialog").get_by_label("Key").fill("plain")
        await page.get_by_role("button", name="Use").click()
        await expect(page.get_by_text("need an operator's key")).to_be_visible()
        await page.evaluate("location.hash = '#/adapters'")
        await page.get_by_role("main").get_by_role("link", name="one").click()
        await expect(page.get_by_role("heading", name="Version")).to_be_visible()
        for name in ("Load onto the device", "Pin", "Remove"):
            await expect(page.get_by_role("button", name=name, exact=True)).to_be_hidden()
        await page.evaluate("location.hash = '#/adapters/nobody'")
        await expect(page.get_by_text("The adapter `nobody` does not exist.")).to_be_visible()
        assert [each for each in complaints if "Failed to load resource" not in each] == []


async def test_a_router_is_seen_with_what_it_knows() -> None:
    backend = ScriptedBackend("b0")
    await backend.start()
    async with (
        routing([backend.url], [backend], adapters=adapters("formal", "pirate")) as router,
        open_page(f"{router.http.base_url}/ui") as (page, complaints),
    ):
        await router.up(1)
        await events(router.http, "/v1/completions", {"model": "pirate", "prompt": "once", "max_tokens": 3})
        await expect(page.locator("#state")).to_contain_text("base: ready")
        await expect(page.get_by_text("TTFT, median")).to_be_visible()
        for hidden in ("Requests", "HTTP API"):
            await expect(page.get_by_role("link", name=hidden, exact=True)).to_be_hidden()
        await page.evaluate("location.hash = '#/adapters'")
        await expect(page.locator("tbody tr")).to_have_count(3)
        await expect(page.locator("tbody tr").first).to_contain_text("pirate")
        await page.evaluate("location.hash = '#/replicas'")
        await expect(page.get_by_role("heading", name="backend-0")).to_be_visible()
        await expect(page.get_by_text("1 adapters loaded")).to_be_visible()
        assert complaints == []
    await backend.kill()


def test_the_built_files_are_those_of_the_sources(tmp_path: Path) -> None:
    """``make ui`` builds them; see ui/."""
    if shutil.which("npm") is None:
        pytest.skip("there is no Node")
    folder = ROOT / "ui"
    if not (folder / "node_modules").exists():
        folder = Path(shutil.copytree(folder, tmp_path / "ui"))
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    subprocess.run(["npm", "run", "check"], cwd=folder, check=True)
    subprocess.run(["node", "build.mjs", str(tmp_path / "built")], cwd=folder, check=True)
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    tracked = {path.name: path.read_bytes() for path in FILES.iterdir()}
    assert built.keys() == tracked.keys()
    assert [name for name in built if built[name] != tracked[name]] == [], "run `make ui`"
