"""A prompt of embeddings is computed from these, in chunks, after a preemption and after the engine's end."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from lorikeet.core.ids import RequestId
from lorikeet.core.request import PromptEmbeds, Request
from lorikeet.engine.build import build_replica
from tests.support.live import greedy, live_settings, make_adapter, make_model, prompt, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def embedded(model: Path, request: Request, salt: str = "x") -> Request:
    """The same request by the embeddings of its tokens; its ids mean nothing."""
    weights = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    embeds = PromptEmbeds("float32", weights[torch.tensor(request.prompt_token_ids)].float().numpy().tobytes())
    return msgspec.structs.replace(
        request,
        request_id=RequestId(f"{request.request_id}-embeds"),
        prompt_token_ids=[0] * len(request.prompt_token_ids),
        prompt_embeds=embeds,
        cache_salt=salt,
    )


@pytest.mark.slow
def test_embeddings_of_the_tokens_give_the_answers_of_the_tokens(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "one", model, seed=1)
    plain = [
        greedy("base", prompt(40, 1), 8),
        greedy("adapter", prompt(21, 2), 8, adapter),
        greedy("short", prompt(1, 3), 8),
        greedy("penalty", prompt(9, 4), 8, frequency_penalty=0.5),
    ]
    engine = build_replica(live_settings(model, max_num_batched_tokens=16)).engine  # prompts are computed in chunks
    try:
        alone = run(engine, plain)
        assert run(engine, [embedded(model, each, str(at)) for at, each in enumerate(plain)]) == alone
        mixed = [*plain, *(embedded(model, each, str(at)) for at, each in enumerate(plain))]
        again = [msgspec.structs.replace(each, request_id=RequestId(f"{each.request_id}-2")) for each in mixed]
        assert run(engine, again) == alone + alone
        # As after the engine's end: the request with the tokens that have arrived.
        resumed = [
            msgspec.structs.replace(
                embedded(model, each, f"new{at}"), request_id=RequestId(f"{at}"), output_token_ids=tokens[:3], attempt=1
            )
            for at, (each, tokens) in enumerate(zip(plain, alone, strict=True))
        ]
        assert run(engine, resumed) == [tokens[3:] for tokens in alone]
    finally:
        engine.close()


def test_a_preempted_request_goes_on_with_its_embeddings(model: Path) -> None:
    engine = build_replica(live_settings(model, max_num_seqs=1)).engine
    try:
        plain = greedy("plain", prompt(20, 5), 12)
        (alone,) = run(engine, [plain])
        waiting = msgspec.structs.replace(embedded(model, plain), background=True)
        engine.submit(waiting)
        tokens = [token.token_id for _ in range(3) for output in engine.step().tokens for token in output.tokens]
        engine.submit(greedy("urgent", prompt(5, 6), 2))
        while engine.has_requests:
            outputs = engine.step().tokens
            tokens += [t.token_id for each in outputs if each.request_id == waiting.request_id for t in each.tokens]
        assert engine.stats().preemptions == 1
        assert tokens == alone
    finally:
        engine.close()
