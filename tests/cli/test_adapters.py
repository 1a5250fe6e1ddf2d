"""``lorikeet adapters promote``, against a server whose answers are given."""

from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.cli.http_client import ServerClient


@pytest.mark.parametrize(
    ("version", "changed"),
    [
        ("legal-v3", {"versions": {"legal-v3": 1.0}, "shadow": {"legal-v4": 0.1}}),
        ("legal-v4", {"versions": {"legal-v4": 1.0}, "shadow": {}}),
        ("pirate", None),
    ],
)
def test_only_a_version_or_shadow_of_a_split_is_promoted(
    monkeypatch: pytest.MonkeyPatch, version: str, changed: dict[str, Any] | None
) -> None:
    card = {"versions": {"legal-v2": 0.9, "legal-v3": 0.1}, "shadow": {"legal-v4": 0.1}}
    sent = []
    monkeypatch.setattr(ServerClient, "get", lambda *_: card)
    monkeypatch.setattr(ServerClient, "patch", lambda _, path, body: sent.append((path, body)))
    result = CliRunner().invoke(app, ["adapters", "promote", "legal", version])
    assert sent == ([] if changed is None else [("/v1/adapters/legal", changed)])
    assert result.exit_code == (0 if changed else 1)
    if changed is None:
        assert "'pirate' is not a version of legal, which has legal-v2, legal-v3, legal-v4" in result.output
