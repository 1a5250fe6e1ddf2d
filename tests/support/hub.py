"""A Hub on this machine: the routes of Hugging Face's that reading a repository's files needs."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

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


@contextmanager
def hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """Serve repositories, ``org/repo`` to folder, on a free port; yield the value of ``HF_ENDPOINT``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"repositories": repositories}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
