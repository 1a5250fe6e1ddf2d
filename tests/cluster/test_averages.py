"""Averages over finished requests."""

import pytest

from lorikeet.cluster.routing import fleet as module
from lorikeet.cluster.routing.fleet import RequestAverages
from lorikeet.core.ids import AdapterDigest


def test_an_adapter_that_has_not_answered_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 2)
    averages = RequestAverages()
    for name, seconds in (("x", 1.0), ("y", 2.0), ("x", 3.0), ("z", 8.0)):
        averages.finished(AdapterDigest(name), 10, seconds)
    of = {name: averages.execution_s(AdapterDigest(name)) for name in "xyz"}
    assert (of["x"], of["z"]) == (2.0, 8.0)
    assert of["y"] == averages.execution_s(AdapterDigest("unknown")) == pytest.approx(3.5)
