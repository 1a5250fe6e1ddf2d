"""HTTPS: a server's certificate, and how it is renewed."""

import asyncio
import re
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
import uvicorn
from structlog.testing import capture_logs

from lorikeet.config import ConfigError
from lorikeet.http.listening import ListeningServer, listen
from lorikeet.http.tls import Certificate, open_certificate
from tests.http.answers import answer
from tests.support.waiting import until


class Files:
    """The files of a server's certificate, which some authority has signed."""

    def __init__(self, folder: Path) -> None:
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"

    def issue(self, authority: trustme.CA) -> None:
        leaf = authority.issue_cert("127.0.0.1")
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(self.key)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.slow
async def test_renewed_certificate_is_used_and_an_invalid_one_ignored(tmp_path: Path) -> None:
    old = trustme.CA()
    new = trustme.CA()
    files = Files(tmp_path)
    files.issue(old)
    certificate = open_certificate(str(files.cert), str(files.key))
    assert certificate is not None

    with listen("127.0.0.1", 0) as listener:
        server = ListeningServer(uvicorn.Config(answer, lifespan="off", log_level="error"), listener, certificate)
        serving = asyncio.create_task(server._serve())
        await until(lambda: server.started, "the server has started")
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"

        async def is_trusted_by(authority: trustme.CA) -> bool:
            async with httpx.AsyncClient(verify=trusting(authority)) as http:
                try:
                    return (await http.get(url)).status_code == 204
                except httpx.ConnectError as error:
                    return "certificate verify failed" not in str(error)

        assert await is_trusted_by(old)
        with capture_logs() as logs:
            certificate.renew()
            assert logs == [], "nothing has changed"
            files.cert.write_text("half a certificate")
            certificate.renew()
            assert await is_trusted_by(old)
            files.cert.unlink()
            certificate.renew()
            files.issue(new)
            certificate.renew()
        assert [entry["log_level"] for entry in logs] == ["warning", "warning", "info"]
        assert await is_trusted_by(new)
        assert not await is_trusted_by(old)
        server.should_exit = True
        await serving


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Files(tmp_path)
    others = Files(tmp_path / "others")
    others.cert.parent.mkdir()
    for each in (files, others):
        each.issue(trustme.CA())
    with pytest.raises(ConfigError, match=re.escape(f"--ssl-certfile {tmp_path / 'none'}: No such file")):
        Certificate(str(tmp_path / "none"))
    pair = re.escape(f"--ssl-certfile {files.cert} and --ssl-keyfile {others.key}")
    with pytest.raises(ConfigError, match=f"{pair}: .*MISMATCH"):
        Certificate(str(files.cert), str(others.key))
    with pytest.raises(ConfigError, match=re.escape(str(files.cert))):
        Certificate(str(files.cert))  # without a key
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        open_certificate("", str(files.key))
    assert open_certificate("", "") is None


@pytest.mark.slow
def test_the_router_answers_over_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = Files(tmp_path)
    files.issue(authority)
    command = [
        sys.executable,
        "-c",
        "from lorikeet.cli.main import main; main()",
        "router",
        "--backend",
        "http://127.0.0.1:9",
    ]
    command += ["--port", "0", "--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key), "--log-json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as router:
        try:
            assert router.stderr is not None
            found = next(filter(None, (re.search(r"https://127\.0\.0\.1:\d+", line) for line in router.stderr)))
            assert httpx.get(f"{found[0]}/health", verify=trusting(authority)).status_code == 503, "no backend"
        finally:
            router.terminate()
