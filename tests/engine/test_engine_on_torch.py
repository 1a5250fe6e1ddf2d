"""The whole engine with real arithmetic: no arena is too small for the tokens to be right."""

from pathlib import Path

import msgspec
import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvicted
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import replay
from tests.support.driver import Models, fp32_settings, make_models, peer_tokens, random_tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def run(engine: Engine) -> list[StepOutputs]:
    """Step until every request has ended."""
    outputs = []
    while engine.has_requests or engine.is_busy:
        outputs.append(engine.step())
        if not engine.is_busy:
            engine.wait_for_load(1.0)
    return outputs


def greedy(name: str, prompt: list[int], adapter: AdapterRef | None) -> Request:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    return Request(RequestId(name), prompt, params, arrival_s=0.0, adapter=adapter)


@pytest.mark.parametrize(
    ("row", "kernels", "memory_bytes", "is_scarce"),
    [
        ("auto", "native", 340_000, True),
        ("auto", "native", 4_000_000, False),
        ("auto", "reference", 340_000, True),
        ("lorikeet:plain-padded", "native", 4_000_000, False),
        ("lorikeet:plain-einsum", "native", 4_000_000, False),
        ("lorikeet:plain-einsum", "reference", 4_000_000, False),
    ],
)
def test_tokens_are_those_of_transformers_and_peft_through_preemption_reuse_and_reloads(
    models: Models, tmp_path: Path, row: str, kernels: str, memory_bytes: int, is_scarce: bool
) -> None:
    settings = fp32_settings(
        row=row,
        kernels=kernels,
        memory_bytes=memory_bytes,
        max_running=8,
        max_step_tokens=24,
        max_repeat=4,
        record=str(tmp_path / "run"),
    )
    model = msgspec.structs.replace(settings.model, model=str(models.folder))
    engine = build_replica(msgspec.structs.replace(settings, model=model)).engine
    refs = [None, *models.adapters.values()]
    shared = random_tokens(20, seed=0)  # one prefix under every adapter: reuse must not cross them
    requests = [
        greedy(f"r{index}", shared + random_tokens(index, seed=index), refs[index % len(refs)]) for index in range(16)
    ]
    try:
        for request in requests:
            engine.submit(request)
        outputs = run(engine)
    finally:
        engine.close()
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for output in (output for turn in outputs for output in turn.tokens):
        tokens[output.request_id].append(output.token.token_id)
    for request in requests:
        expected = peer_tokens(models.folder, request.adapter, request.prompt_token_ids, 24)
        assert tokens[request.request_id] == expected, request.request_id
    evicted = [event for turn in outputs for event in turn.adapter_events if isinstance(event, AdapterEvicted)]
    stats = engine.stats()
    assert stats.prefix_hits_tokens > 0
    assert bool(stats.preemptions and evicted) == is_scarce
    # The same decisions without arithmetic, threads and the real clock.
    replayed = replay(Recording(tmp_path / "run"))
    assert replayed.difference is None
    assert replayed.steps == stats.steps
