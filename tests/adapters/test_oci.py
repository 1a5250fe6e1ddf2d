"""Adapters from an OCI registry on this machine."""

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterError, AdapterNotFound
from lorikeet.adapters.sources import fetch
from lorikeet.config import AdapterSettings
from tests.support.fakes import write_adapter
from tests.support.web_server import serving_http

pytestmark = pytest.mark.slow

FILES = ("adapter_config.json", "adapter_model.safetensors")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Registry:
    """What a registry holds: manifests by repository and reference, and blobs by digest."""

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.address = ""

    def push(self, repository: str, tag: str, folder: Path, **changes: Any) -> str:
        """Store the files of a folder as layers with titles; return the digest of the manifest."""
        layers = []
        for name in FILES:
            content = (folder / name).read_bytes()
            self.blobs[digest_of(content)] = content
            annotations = {"org.opencontainers.image.title": name}
            layers.append({"digest": digest_of(content), "size": len(content), "annotations": annotations})
        manifest = json.dumps({"schemaVersion": 2, "layers": layers, **changes}).encode()
        for reference in (tag, digest_of(manifest)):
            self.manifests[repository, reference] = manifest
        return digest_of(manifest)


@pytest.fixture
def registry() -> Iterator[Registry]:
    held = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repository, kind, reference = self.path.removeprefix("/v2/").rsplit("/", 2)
            found = held.manifests.get((repository, reference)) if kind == "manifests" else held.blobs.get(reference)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving_http(Handler) as url:
        held.address = url.replace("http://", "oci://")
        yield held


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def read(registry: Registry, source: str, tmp_path: Path) -> Path:
    into = tmp_path / "into"
    into.mkdir()
    fetch(source, AdapterSettings(allowed_sources=(f"{registry.address}/team/",)), into)
    return into


def test_an_adapter_is_read_by_tag_and_by_digest(registry: Registry, folder: Path, tmp_path: Path) -> None:
    digest = registry.push("team/legal", "v1", folder)
    for number, reference in enumerate((":v1", f"@{digest}")):
        (tmp_path / str(number)).mkdir()
        into = read(registry, f"{registry.address}/team/legal{reference}", tmp_path / str(number))
        assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_content_that_was_changed_is_refused(registry: Registry, folder: Path, tmp_path: Path) -> None:
    registry.push("team/legal", "v1", folder)
    weights = digest_of((folder / FILES[1]).read_bytes())
    registry.blobs[weights] = registry.blobs[weights][:-1] + b"x"
    with pytest.raises(AdapterError, match="the manifest says sha256:"):
        read(registry, f"{registry.address}/team/legal:v1", tmp_path)


def test_a_manifest_that_was_changed_is_refused(registry: Registry, folder: Path, tmp_path: Path) -> None:
    digest = registry.push("team/legal", "v1", folder)
    registry.manifests["team/legal", digest] += b" "
    with pytest.raises(AdapterError, match=f"not {digest}"):
        read(registry, f"{registry.address}/team/legal@{digest}", tmp_path)


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("/team/legal:v2", AdapterNotFound, "no such repository"),
        ("/team/image:v1", AdapterError, "no titles"),
        ("/team/index:v1", AdapterError, "lists no layers"),
        ("/others/legal:v1", AdapterError, "not below an allowed source"),
    ],
)
def test_a_source_that_has_no_adapter_is_named(
    registry: Registry, folder: Path, tmp_path: Path, source: str, kind: type[AdapterError], reason: str
) -> None:
    registry.push("team/legal", "v1", folder)
    registry.push("others/legal", "v1", folder)
    registry.push("team/image", "v1", folder, layers=[{"digest": "sha256:0", "size": 0}])
    registry.push("team/index", "v1", folder, layers=None)
    with pytest.raises(kind, match=reason):
        read(registry, registry.address + source, tmp_path)
