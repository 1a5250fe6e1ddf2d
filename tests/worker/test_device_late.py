"""An engine with late copies touches no block of a running copy, and its tokens are right."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.worker.transfer import transfers
from tests.support.driver import SCARCE, Models, make_models, peer_tokens, random_tokens, tight_settings
from tests.support.late_device import LateDevice, LateMark, LateStream, Span, steps_seen_by

pytestmark = pytest.mark.slow

TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


# --- the device itself -------------------------------------------------------------------------------


def test_copy_is_done_when_a_later_mark_is_awaited() -> None:
    device = LateDevice()
    memory = torch.ones(2, 8)
    arena = torch.zeros(2, 8)
    unregister = device.register(memory)
    stream = device.stream()
    before = stream.record_event()
    stream.copy(memory[0], arena[0])
    first = stream.record_event()
    stream.copy(memory[1], arena[1])
    before.wait()
    assert not arena.any()
    first.wait()
    assert arena[0].all()
    assert not arena[1].any()
    stream.record_event().wait()
    assert arena.all()
    unregister()
    assert device.faults == []


def test_using_blocks_of_a_running_transfer_is_an_error_unless_ordered() -> None:
    for follows, touches_same in itertools.product((False, True), repeat=2):
        device = LateDevice()
        memory = torch.ones(1, 8)
        arena = torch.zeros(2, 8)
        device.register(memory)
        device.compute(reads=[Span.of(arena[0])], writes=[])
        stream = device.stream()
        if follows:
            stream.wait_event(device.steps.record_event())
        stream.copy(memory[0], arena[0 if touches_same else 1])
        assert bool(device.faults) == (touches_same and not follows)


def test_a_step_may_use_loaded_adapters_but_not_loading_ones() -> None:
    device = LateDevice()
    memory = torch.ones(1, 8)
    arena = torch.zeros(1, 8)
    device.register(memory)
    stream = device.stream()
    stream.copy(memory[0], arena[0])
    stream.record_event().wait()
    device.compute(reads=[Span.of(arena[0])], writes=[])
    assert device.faults == []
    stream.wait_event(device.steps.record_event())
    stream.copy(arena[0], memory[0])
    device.compute(reads=[Span.of(arena[0])], writes=[])
    assert device.faults == [], "both read"
    device.compute(reads=[], writes=[Span.of(arena[0])])
    assert device.faults


def test_memory_must_be_registered_while_it_is_copied() -> None:
    device = LateDevice()
    memory = torch.ones(1, 8)
    arena = torch.zeros(1, 8)
    device.stream().copy(memory[0], arena[0])
    assert device.faults == ["a copy is not between registered memory and the device"]
    device = LateDevice()
    unregister = device.register(memory)
    device.stream().copy(memory[0], arena[0])
    unregister()
    assert device.faults == ["memory that copies touch is registered no longer"]


# --- the engine on it --------------------------------------------------------------------------------


def run_late(
    models: Models,
    preset: str,
    memory_bytes: int,
    host_memory_bytes: int,
    kernels: str = "native",
    count: int = 16,
    answer: int = TOKENS,
    copies_ahead: int = 2,
) -> tuple[LateDevice, bool]:
    """Serve more than fits, with no copy done during a step; return the device, and whether all tokens were right."""
    device = LateDevice(copies_ahead)
    settings = tight_settings(
        models.folder, preset=preset, kernels=kernels, memory_bytes=memory_bytes, host_memory_bytes=host_memory_bytes
    )
    refs = [None, *models.adapters.values()]
    shared = random_tokens(20, seed=0)
    params = SamplingParams(max_tokens=answer, temperature=0.0)
    requests = [
        Request(RequestId(f"r{i}"), shared + random_tokens(i, seed=i), params, 0.0, refs[i % len(refs)])
        for i in range(count)
    ]
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    with pytest.MonkeyPatch.context() as patch, steps_seen_by(device):
        patch.setattr(transfers, "device_at", lambda place: device)
        engine = build_replica(settings).engine
        try:
            for request in requests:
                engine.submit(request)
            until_s = time.monotonic() + 120.0
            while engine.has_requests or engine.is_busy:
                assert time.monotonic() < until_s
                with device.hold():
                    outputs = engine.step()
                for output in outputs.tokens:
                    tokens[output.request_id] += [token.token_id for token in output.tokens]
                if not engine.is_busy:
                    engine.wait_for_transfer(1.0)
        finally:
            engine.close()
    right = all(
        tokens[request.request_id] == peer_tokens(models.folder, request.adapter, request.prompt_token_ids, answer)
        for request in requests
    )
    return device, right


@pytest.mark.parametrize(
    ("preset", "memory_bytes", "host_memory_bytes", "copies_ahead"),
    [
        ("auto", SCARCE, 0, 2),
        ("elora", SCARCE, 600_000, 2),
        ("elora", SCARCE, 600_000, 8),
        ("elora:wom", SCARCE, 100_000, 2),
        ("vllm-static,adapter_share=0.7", SCARCE, 600_000, 2),
    ],
)
def test_steps_and_late_copies_never_touch_the_same(
    models: Models, preset: str, memory_bytes: int, host_memory_bytes: int, copies_ahead: int
) -> None:
    device, right = run_late(models, preset, memory_bytes, host_memory_bytes, copies_ahead=copies_ahead)
    assert device.faults == []
    assert device.copied_beside_steps, "or there was nothing to see"
    assert right


def test_graphs_and_late_copies_never_touch_the_same(tmp_path: Path) -> None:
    models = make_models(tmp_path, num_hidden_layers=1)  # the interpreter is slow
    device, right = run_late(models, "elora", 100_000, 200_000, kernels="triton", count=5, answer=4)
    assert device.faults == []
    assert device.copied_beside_graphs, "or there was nothing to see"
    assert right


def test_copies_that_do_not_follow_the_steps_would_be_seen(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateStream, "wait_event", lambda self, mark: None)
    device, _ = run_late(models, "elora", SCARCE, 600_000)
    assert any("neither waits" in fault for fault in device.faults)


def test_copies_reported_too_early_are_detected(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateMark, "wait", lambda self: None)
    device, right = run_late(models, "auto", SCARCE, 0)
    assert any("neither waits" in fault for fault in device.faults)
    assert not right
