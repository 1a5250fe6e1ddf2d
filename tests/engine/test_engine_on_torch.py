"""The whole engine with real arithmetic: no arena is too small for the tokens to be right."""

from pathlib import Path

import pytest

from lorikeet.core.events import AdapterEvicted
from lorikeet.core.messages import ExportedKv, ImportKv, StepOutputs
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import replay
from lorikeet.presets import resolve_preset
from tests.support.driver import (
    AMPLE,
    SCARCE,
    Models,
    answer,
    check_answers,
    greedy_requests,
    make_models,
    tight_settings,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kernels", "memory_bytes", "host_memory_bytes"),
    [
        ("auto", "native", SCARCE, 0),
        ("auto", "native", AMPLE, 0),
        ("auto", "reference", SCARCE, 0),
        ("lorikeet:plain-padded", "native", AMPLE, 0),
        ("lorikeet:plain-einsum", "native", AMPLE, 0),
        ("lorikeet:plain-einsum", "reference", AMPLE, 0),
        ("elora", "native", SCARCE, 600_000),
        ("elora:wom", "native", SCARCE, 100_000),
        ("vllm-static,adapter_share=0.7", "native", SCARCE, 600_000),
        ("chameleon:no-scheduler", "native", SCARCE, 300_000),
        ("toppings", "native", SCARCE, 600_000),
    ],
)
def test_tokens_match_transformers_and_peft_across_preemption_and_reloads(
    models: Models, tmp_path: Path, preset: str, kernels: str, memory_bytes: int, host_memory_bytes: int
) -> None:
    settings = tight_settings(
        models.folder,
        preset=preset,
        kernels=kernels,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        record=str(tmp_path / "run"),
    )
    engine = build_replica(settings).engine
    requests = greedy_requests([None, *models.adapters.values()], 16, max_tokens=24)
    try:
        outputs = answer(engine, requests)
    finally:
        engine.close()
    check_answers(models.folder, requests, outputs)
    evicted = [event for turn in outputs for event in turn.adapter_events if isinstance(event, AdapterEvicted)]
    stats = engine.stats()
    if host_memory_bytes == 0:
        assert bool(evicted) == (memory_bytes == SCARCE)
        assert stats.prefix_hits_tokens > 0
        assert bool(stats.preemptions) == (memory_bytes == SCARCE)
    else:
        moved = stats.memory.transfers
        assert moved["host-device"].transfers > 0
        assert "kept" not in resolve_preset(preset)[1].kv_after_finish or moved["device-host"].transfers > 0
    # The same decisions without arithmetic, threads and the real clock.
    replayed = replay(Recording(tmp_path / "run"))
    assert replayed.difference is None
    assert replayed.steps == stats.steps


def stepped(engine: Engine) -> StepOutputs:
    outputs = engine.step()
    if not engine.is_busy:
        engine.wait_for_transfer(1.0)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [{}, {"tensor_parallel": 2}, pytest.param({"pipeline_parallel": 3}, marks=pytest.mark.long)],
)
def test_a_request_goes_on_at_another_engine_with_the_kv_of_all_ranks(
    models: Models, tmp_path: Path, ranks: dict[str, int]
) -> None:
    settings = tight_settings(models.folder, preset="lorikeet:plain", host_memory_bytes=2**21, **ranks)
    (ref,) = list(models.adapters.values())[:1]
    (request,) = greedy_requests([ref], 1, max_tokens=24)
    outputs: list[StepOutputs] = []
    source = build_replica(settings).engine
    try:
        source.submit(request)
        while sum(len(each.tokens) for turn in outputs for each in turn.tokens) < 6:
            outputs.append(stepped(source))
        begun = source.export_with_kv(request.request_id)
        assert begun is not None
        exported: tuple[ExportedKv, ...] = ()
        while not exported:
            exported = stepped(source).exported_kv
    finally:
        source.close()
    assert exported[0].blocks
    target = build_replica(settings).engine
    try:
        target.import_kv(ImportKv(begun.adapter, exported[0].keys, exported[0].blocks))
        check_answers(models.folder, [request], [*outputs, *answer(target, [begun])])
        assert target.stats().prefix_hits_tokens == len(exported[0].keys) * settings.engine.block_size
    finally:
        target.close()
