"""Adapters that are on the device cost a batch of the base model nothing, counted in kernel calls."""

from pathlib import Path
from unittest import mock

import pytest

from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.models.checkpoints import make_checkpoint
from tests.support.recording_kernels import Call, RecordingKernels

ADAPTERS, REQUESTS, TOKENS = 20, 8, 6


def request(name: str, prompt: list[int], tokens: int, adapter: AdapterRef | None = None) -> Request:
    return Request(RequestId(name), prompt, SamplingParams(max_tokens=tokens, temperature=0.0), 0.0, adapter)


@pytest.mark.slow
def test_a_base_only_batch_makes_the_same_calls_with_twenty_adapters_resident_as_with_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    kernels = RecordingKernels(ReferenceKernels())
    settings = Settings(
        ModelSettings(model=str(tmp_path / "model"), dtype="float32"),
        EngineSettings(memory_bytes=2**24, threads=1, draft_tokens=0),
    )
    with mock.patch("lorikeet.worker.rank_setup.choose_kernels", return_value=kernels):
        built = build_replica(settings)
    engine = built.engine

    def run(requests: list[Request]) -> list[Call]:
        kernels.calls.clear()
        for each in requests:
            engine.submit(each)
        while engine.has_requests:
            engine.step()
            if not engine.is_busy and engine.has_requests:
                engine.wait_for_transfer()
        return list(kernels.calls)

    def base_only(first_token: int) -> list[Call]:
        # Prompts that differ between the runs, so that neither finds KV of the other.
        prompts = [[first_token + i] * (20 + i) for i in range(REQUESTS)]
        return run([request(f"{first_token}-{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)])

    try:
        without = base_only(10)
        geometry = built.sizes.geometry
        folders = [write_random_adapter(tmp_path / f"a{i}", geometry, 8, seed=i) for i in range(ADAPTERS)]
        refs = [reference(folder.name, folder, geometry) for folder in folders]
        warm = run([request(f"warm-{i}", [i + 1, i + 2], 1, ref) for i, ref in enumerate(refs)])
        assert len(engine.stats().resident_adapters) == ADAPTERS
        assert any(call[0] == "linear with lora" for call in warm)
        assert without
        assert base_only(30) == without
    finally:
        engine.close()
