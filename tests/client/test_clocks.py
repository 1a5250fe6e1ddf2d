"""Engines on machines with other clocks: their times are converted."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lorikeet.client.client import EngineClient
from lorikeet.core.clock import RemoteClock, boot_id
from lorikeet.core.events import AdapterEvicted, Finished, FinishReason, Queued
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import EngineStats, StepOutputs
from tests.support.live import finish, greedy, live_settings, make_model, prompt
from tests.support.scripted import Bench

pytestmark = pytest.mark.slow

R = RequestId("r")
AHEAD_S = 1000.0
"""Our clock, of the engine's."""


def stats_at(at_s: float) -> EngineStats:
    return msgspec.structs.replace(Bench().engine.stats(), at_s=at_s)


def test_all_times_in_messages_are_converted() -> None:
    clock = RemoteClock(5.0, 5.0 + AHEAD_S)
    request = msgspec.structs.replace(greedy("r", [1], 1), arrival_s=1007.0)
    assert clock.to_remote(request) == msgspec.structs.replace(request, arrival_s=7.0)
    events = (Queued(R, 8.0), Finished(R, 9.0, FinishReason.STOP))
    outputs = StepOutputs((), events, (AdapterEvicted(AdapterDigest("d"), 10.0, 1),), stats_at(11.0))
    told = clock.to_local(outputs, 11.0 + AHEAD_S)
    assert [each.at_s for each in (*told.events, *told.adapter_events)] == [1008.0, 1009.0, 1010.0]
    assert told.stats is not None
    assert told.stats.at_s == 1011.0
    assert told.events[1] == Finished(R, 1009.0, FinishReason.STOP)


def test_fast_message_corrects_the_offset_of_a_slow_one() -> None:
    clock = RemoteClock(0.0, 0.5 + AHEAD_S)  # half a second on its way
    one = StepOutputs((), (Queued(R, 1.0),), ())
    assert clock.to_local(one, 1.5 + AHEAD_S).events[0].at_s == 1.5 + AHEAD_S
    quick = StepOutputs((), (Queued(R, 2.0),), (), stats_at(2.0))
    assert clock.to_local(quick, 2.001 + AHEAD_S).events[0].at_s == pytest.approx(2.001 + AHEAD_S)
    late = StepOutputs((), (Queued(R, 3.0),), (), stats_at(3.0))
    assert clock.to_local(late, 3.4 + AHEAD_S).events[0].at_s == pytest.approx(3.001 + AHEAD_S, abs=0.001)


def test_clock_drift_is_followed() -> None:
    clock = RemoteClock(0.0, AHEAD_S)
    for second in range(1, 1000):  # ours is faster by 50 parts in a million
        now = second * (1 + 5e-5) + AHEAD_S
        told = clock.to_local(StepOutputs((), (), (), stats_at(float(second))), now)
        assert told.stats is not None
        assert abs(told.stats.at_s - now) < 1e-3


async def test_answers_of_an_engine_on_another_machine_have_our_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.client.supervisor.boot_id", lambda: "another " + boot_id())
    ours = SimpleNamespace(monotonic=lambda: time.monotonic() + AHEAD_S)
    monkeypatch.setattr("lorikeet.client.supervisor.time", ours)
    client = EngineClient(live_settings(make_model(tmp_path / "model")))
    try:
        await client.start(lambda progress: None)
        arrival_s = ours.monotonic()
        handle = client.submit(msgspec.structs.replace(greedy("r", prompt(8), 5), arrival_s=arrival_s))
        finished, _ = await finish(handle)
        assert finished.reason is FinishReason.LENGTH
        times = handle.timings
        assert times.queued_s is not None
        assert times.finished_s is not None
        # As exactly as the engine's first messages came quickly.
        assert arrival_s - AHEAD_S / 10 < times.queued_s < times.finished_s < ours.monotonic() + AHEAD_S / 10
    finally:
        await client.close()
