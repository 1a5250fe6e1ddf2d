"""What reaches the log, and what must not."""

from collections.abc import Iterator

import pytest
import structlog

from lorikeet.server.logs import configure_logs, log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave structlog as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_tracebacks_show_no_local_variables(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure_logs("info", as_json=as_json)

    def fails(key: str) -> None:
        raise RuntimeError("broken")

    try:
        fails("sk-" + "secret")
    except RuntimeError:
        log.exception("unexpected error")
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert "broken" in shown
    assert "sk-secret" not in shown
