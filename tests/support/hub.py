"""A Hub on this machine: the routes of Hugging Face's that reading a repository's files needs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

from tests.support.web_server import serving_http

_COMMIT = "0" * 40


class _Hub(BaseHTTPRequestHandler):
    repositories: ClassVar[Mapping[str, Path]] = {}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        self._answer(form.get("paths", []))

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, paths: Sequence[str] = ()) -> None:
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        organisation, name, *rest = (path.removeprefix("api/models/") + "//").split("/")
        folder = self.repositories.get(f"{organisation}/{name}")
        rest = [part for part in rest if part]
        if folder is None:
            self._send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})
        elif is_api:
            files: list[dict[str, Any]] = [
                {"type": "file", "path": file.name, "rfilename": file.name, "size": file.stat().st_size, "oid": "0"}
                for file in sorted(folder.iterdir())
            ]
            if rest[:1] == ["tree"] and len(rest) > 2:
                self._send(b"{}", status=404, headers={"X-Error-Code": "EntryNotFound"})
                return
            repository = {"id": f"{organisation}/{name}", "sha": _COMMIT, "siblings": files, "tags": []}
            named: list[dict[str, Any]] = [file for file in files if file["path"] in paths]
            answers = {"tree": files, "paths-info": named}
            self._send(json.dumps(answers.get((*rest, "")[0], repository)).encode())
        elif rest[:1] == ["resolve"] and (folder / rest[-1]).is_file():
            content = (folder / rest[-1]).read_bytes()
            start, _, _ = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            self._send(content[int(start) :], headers={"ETag": '"0"', "X-Repo-Commit": _COMMIT})
        else:
            self._send(b"{}", status=404, headers={"X-Error-Code": "EntryNotFound"})

    def _send(self, content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def hub(repositories: Mapping[str, Path]) -> AbstractContextManager[str]:
    """Serve repositories, ``org/repo`` to folder, on a free port; enter for the value of ``HF_ENDPOINT``."""
    return serving_http(type("Hub", (_Hub,), {"repositories": repositories}))
