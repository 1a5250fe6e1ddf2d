"""Vectors of prompts: the hidden states of transformers, whatever else is in the batch."""

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Pooling, PoolingKind
from lorikeet.engine.build import build_replica
from tests.engine.vectors import collect, pooled
from tests.support.live import greedy, live_settings, make_adapter, make_model, prompt, run

KINDS = tuple(PoolingKind)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@cache
def decoder(model: Path, adapter: str) -> torch.nn.Module:
    """The decoder of transformers, with an adapter by PEFT."""
    base = AutoModelForCausalLM.from_pretrained(model)
    return PeftModel.from_pretrained(base, adapter).base_model.model.model if adapter else base.model


def expected(model: Path, token_ids: list[int], kind: PoolingKind, adapter: AdapterRef | None = None) -> np.ndarray:
    """What transformers and PEFT compute."""
    with torch.inference_mode():
        inner = decoder(model, "" if adapter is None else adapter.folder)
        states = inner(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    positions = torch.arange(1.0, len(states) + 1)
    vector = {
        PoolingKind.LAST: lambda: states[-1],
        PoolingKind.MEAN: lambda: states.mean(dim=0),
        PoolingKind.WEIGHTED_MEAN: lambda: (states * positions[:, None]).sum(dim=0) / positions.sum(),
    }[kind]()
    return vector.numpy()


@pytest.mark.slow
def test_vectors_are_those_of_transformers_beside_generation_in_chunks_and_after_reuse(
    model: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "one", model, seed=1)
    cases = [
        (f"{kind}-{tokens}-{where and 'adapter'}", prompt(tokens, tokens), kind, where)
        for kind in KINDS
        for tokens in (1, 9, 40)
        for where in (None, adapter)
    ]
    answers = [greedy("a", prompt(30, 5), 6), greedy("b", prompt(12, 6), 6, adapter)]
    engine = build_replica(live_settings(model, max_num_batched_tokens=16)).engine
    try:
        alone = run(engine, answers)
        for turn in range(2):  # the second one finds KV of the first
            for name, token_ids, kind, where in cases:
                engine.submit(pooled(f"{name}-{turn}", token_ids, Pooling(kind), where))
            for each in answers:
                engine.submit(msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}{turn}")))
            found = collect(engine)
            for name, token_ids, kind, where in cases:
                vector = found[f"{name}-{turn}"]
                np.testing.assert_allclose(vector, expected(model, token_ids, kind, where), atol=2e-5, err_msg=name)
        again = [msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}-again")) for each in answers]
        assert run(engine, again) == alone
        assert engine.stats().prefix_hits_tokens > 0
        engine._memory.check_integrity()
    finally:
        engine.close()


def test_a_preempted_prompt_is_pooled_from_its_first_token_again(model: Path) -> None:
    token_ids = prompt(40, 1)
    engine = build_replica(live_settings(model, max_num_seqs=1, max_num_batched_tokens=16)).engine
    try:
        for kind in KINDS:
            engine.submit(msgspec.structs.replace(pooled(kind, token_ids, Pooling(kind)), background=True))
            engine.step()
            engine.submit(greedy(f"urgent-{kind}", prompt(5, 6), 2))
            found = collect(engine)
            np.testing.assert_allclose(found[kind], expected(model, token_ids, kind), atol=2e-5)
        assert engine.stats().preemptions == len(KINDS)
    finally:
        engine.close()
