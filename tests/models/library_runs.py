"""Runs bases of transformers' modules in the engine, and by transformers itself for comparison."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.messages import ImageStats, StepOutputs
from lorikeet.core.plan import PromptToken, Token
from lorikeet.core.request import Request, RequestId, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.kernels.backends import choose_kernels
from lorikeet.models.config import read_model_config
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model
from lorikeet.models.transformers_whole import WHOLE, logits_of_rows
from tests.models.library_bases import VOCABULARY

MAX_MODEL_LEN = 64


def make_peft_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> PeftModel:
    """Save a random adapter, by default on all linear layers, and return PEFT's model of it."""
    targets = [name for name, module in linear_layers(model)]
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        # PEFT takes these names for those of experts' parameters, LoRA on which is refused.
        targets = [name for name in targets if name.rpartition(".")[2] not in _OF_EXPERTS]
    if model.config.model_type in _WITHOUT_OUT_PROJ:
        targets = [name for name in targets if not name.endswith("out_proj")]
    given = {"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False, **options}
    torch.manual_seed(5)
    peft = get_peft_model(model, LoraConfig(**given)).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            elif ".modules_to_save." in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    peft.save_pretrained(str(folder))
    return peft


_WITHOUT_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models for which PEFT refuses LoRA on these layers."""
_OF_HEAD = ("lm_head.", "cls.", "generator_predictions.", "pred_layer.")
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def linear_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the linear layers below the output layer, by name."""
    kinds = (nn.Linear, Conv1D, FalconLinear)
    output = model.get_output_embeddings()
    below = [(name, module) for name, module in model.named_modules() if not name.startswith(_OF_HEAD)]
    return [(name, module) for name, module in below if type(module) in kinds and module is not output]


def settings_of(folder: Path, model_impl: str = "transformers", **engine: Any) -> Settings:
    """fp32, blocks of four tokens, steps of at most 16 tokens."""
    small = {"block_size": 4, "host_memory_bytes": 0, "threads": 1, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    model = ModelSettings(str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN, model_impl=model_impl)
    return Settings(model, EngineSettings(**{**small, **engine}), AdapterSettings())


class Outcome(msgspec.Struct):
    """What an engine answered.

    Attributes:
        tokens: of each request.
        prompts: of each request that asked for them, the log probabilities of its prompt by position.
        cached: tokens of each prompt that came from the cache.
        preemptions: how many there were.
        images: counters of images.
    """

    tokens: dict[str, list[Token]]
    prompts: dict[str, dict[int, PromptToken]]
    cached_tokens: int
    preemptions: int
    images: ImageStats


def run(settings: Settings, waves: Sequence[Sequence[Request]]) -> Outcome:
    """Answer waves of requests, one wave after the other."""
    replica = build_replica(settings)
    engine = replica.engine
    outputs: list[StepOutputs] = []
    try:
        for wave in waves:
            for request in wave:
                engine.submit(request)
            while engine.has_requests or engine.is_busy:
                outputs.append(engine.step())
                if not engine.is_busy:
                    engine.wait_for_transfer(1.0)
        stats = engine.stats()
    finally:
        engine.close()
    tokens: dict[str, list[Token]] = {}
    prompts: dict[str, dict[int, PromptToken]] = {}
    for turn in outputs:
        errors = [event.error for event in turn.events if isinstance(event, Finished) and event.error]
        assert not errors, errors
        for output in turn.tokens:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        for scored in turn.prompt_logprobs:
            prompts.setdefault(scored.request_id, {}).update(enumerate(scored.tokens, scored.position))
    return Outcome(tokens, prompts, stats.prefix_hits_tokens, stats.preemptions, stats.images)


def request(name: str, prompt: list[int], adapter: AdapterRef | None, tokens: int, **params: Any) -> Request:
    """A greedy request for all log probabilities."""
    sampling_params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=VOCABULARY, **params)
    return Request(RequestId(name), prompt, sampling_params, arrival_s=0.0, adapter=adapter)


def check(outcome: Outcome, requests: Sequence[Request], base: PreTrainedModel, peft: PeftModel) -> float:
    """Compare every log probability with transformers; return the largest difference.

    Of large ones it is relative: rounding errors of logits grow with them.
    """
    worst = 0.0
    for each in requests:
        answer = outcome.tokens[each.request_id]
        assert len(answer) == each.sampling.max_tokens
        token_ids = [*each.prompt_token_ids, *(token.token_id for token in answer)]
        expected = log_probabilities(peft, token_ids, adapted=each.adapter is not None)
        for position, token in enumerate(answer, start=len(each.prompt_token_ids) - 1):
            found = torch.full((VOCABULARY,), torch.nan)
            for token_id, logprob in token.top:
                found[token_id] = logprob
            worst = max(worst, float(((found - expected[position]) / (1 + 0.1 * expected[position].abs())).abs().max()))
        for position, scored in outcome.prompts.get(each.request_id, {}).items():
            worst = max(worst, abs(scored.logprob - float(expected[position - 1, scored.token_id])))
    return worst


def log_probabilities(model: PeftModel, token_ids: list[int], *, adapted: bool) -> Tensor:
    """Return what transformers computes in one pass by eager attention, ``[tokens, vocabulary]``."""
    with torch.inference_mode(), nullcontext() if adapted else model.disable_adapter():
        base = model.get_base_model()
        if type(base).__name__ in WHOLE:
            return logits_of_rows(base, torch.tensor(token_ids)).log_softmax(-1)
        return base(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].log_softmax(-1)


def geometry_of(folder: Path, model_impl: str) -> ModelGeometry:
    """Return the geometry of a base in fp32, by what computes it."""
    if model_impl == "lorikeet":
        return read_model_config(folder).geometry(4)
    kernels = choose_kernels("auto", torch.float32, torch.device("cpu"))
    return TransformersDecoder(load_model(folder, torch.float32, torch.device("cpu")), kernels, MAX_MODEL_LEN).geometry
