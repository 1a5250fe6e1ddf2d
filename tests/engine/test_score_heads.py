"""Classification adapters: the logits of transformers and PEFT, with many heads in one batch."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from lorikeet.adapters.store import reference
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Pooling, Request
from lorikeet.engine.build import build_replica
from lorikeet.models.config import read_model_config
from tests.engine.vectors import collect, pooled
from tests.models.checkpoints import make_checkpoint
from tests.support.live import CONTEXT_TOKENS, greedy, live_settings, make_adapter, prompt, run

LABELS = (1, 2, 3, 7, 40)


def make_classifier(folder: Path, model: Path, labels: int, seed: int) -> AdapterRef:
    """Save what PEFT makes of a sequence classifier, with random weights."""
    torch.manual_seed(seed)
    config = LoraConfig(task_type="SEQ_CLS", r=1 + seed % 4, target_modules=["q_proj", "down_proj"])
    peft = get_peft_model(AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.4)
    peft.save_pretrained(folder)
    return reference(folder.name, folder, read_model_config(model).geometry(4))


def expected(model: Path, adapter: AdapterRef, token_ids: list[int]) -> np.ndarray:
    """What transformers and PEFT compute."""
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=adapter.labels)
    with torch.inference_mode():
        logits = PeftModel.from_pretrained(base, adapter.folder)(input_ids=torch.tensor([token_ids])).logits[0]
    return logits.numpy()


def scores(adapter: AdapterRef, token_ids: list[int], name: str = "") -> Request:
    return pooled(name or adapter.name, token_ids, Pooling(scores=True), adapter)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_heads_of_several_sizes_run_beside_generation(architecture: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, architecture, max_position_embeddings=CONTEXT_TOKENS)
    adapters = [make_classifier(tmp_path / f"{labels}", model, labels, seed) for seed, labels in enumerate(LABELS)]
    plain = make_adapter(tmp_path / "plain", model, seed=9)
    assert [each.labels for each in (*adapters, plain)] == [*LABELS, 0]
    answers = [greedy("a", prompt(30, 5), 6, plain), greedy("b", prompt(12, 6), 6)]
    engine = build_replica(live_settings(model, max_num_batched_tokens=32)).engine
    try:
        alone = run(engine, answers)
        for adapter in adapters:
            engine.submit(scores(adapter, prompt(20, adapter.labels)))
        engine.submit(pooled("vector", prompt(9, 1), Pooling(), adapters[0]))
        for each in answers:
            engine.submit(msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}-2")))
        found = collect(engine)
        for adapter in adapters:
            logits = expected(model, adapter, prompt(20, adapter.labels))
            np.testing.assert_allclose(found[adapter.name], logits, atol=1e-4, err_msg=adapter.name)
        assert len(found["vector"]) == read_model_config(model).hidden_size
        again = [msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}-3")) for each in answers]
        assert run(engine, again) == alone
        engine._memory.check_integrity()
    finally:
        engine.close()


@pytest.mark.slow
def test_a_hundred_heads_take_turns_on_a_device_that_holds_a_few(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = 100 if request.config.getoption("--all") else 8
    model = tmp_path / "model"
    make_checkpoint(model, "llama", max_position_embeddings=CONTEXT_TOKENS)
    adapters = [make_classifier(tmp_path / f"{number}", model, 1 + number % 9, seed=number) for number in range(count)]
    # The smallest arena that a sequence of this length may have.
    engine = build_replica(live_settings(model, memory_bytes=2**20)).engine
    try:
        for turn in range(2):
            for number, adapter in enumerate(adapters):
                engine.submit(scores(adapter, prompt(12, number), f"{number}-{turn}"))
        found = collect(engine)
        for number, adapter in enumerate(adapters):
            logits = expected(model, adapter, prompt(12, number))
            for turn in range(2):
                np.testing.assert_allclose(found[f"{number}-{turn}"], logits, atol=1e-4)
        engine._memory.check_integrity()
    finally:
        engine.close()
