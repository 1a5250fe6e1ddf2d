"""What ``lorikeet adapters`` does by PEFT itself: converting other types to LoRA, and comparing answers."""

import json
import logging
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from lorikeet.adapters.chat_files import CHAT_FILES
from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import adapted, reference
from lorikeet.cli.local_engine import GenerationError, run_alone
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica

_ROUNDING = 1e-6
"""Singular values below this share of the largest are what is left of rounding."""


class Converted(NamedTuple):
    """How a module was converted.

    Attributes:
        module: its full name.
        rank: of the low-rank matrices.
        error: the Frobenius norm of what is lost, as a share of that of the whole change of the weight.
    """

    module: str
    rank: int
    error: float


class Comparison(NamedTuple):
    """Greedy answers to one prompt.

    Attributes:
        own, by_peft: their tokens.
        logprob_difference: the largest between the two of a token that both chose.
    """

    own: list[int]
    by_peft: list[int]
    logprob_difference: float


def convert(folder: Path, target: Path, base: Path, rank: int, tolerance: float) -> list[Converted]:
    """Write a LoRA adapter that changes a base as another adapter of PEFT does, as nearly as its rank allows.

    Args:
        folder: of the adapter, of any type that PEFT can merge into linear layers.
        target: a folder that does not exist.
        base: of the base that the adapter was trained on.
        rank: the largest rank of a module; 0 for as many as ``tolerance`` needs.
        tolerance: the largest ``Converted.error`` that is accepted.

    Raises:
        AdapterError: PEFT cannot load or merge it, or a module's error is larger.
    """
    with _quiet():
        return _convert(folder, target, base, rank, tolerance)


def _convert(folder: Path, target: Path, base: Path, rank: int, tolerance: float) -> list[Converted]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if target.exists():
        raise AdapterError(f"{target} exists already")
    model = _load(base)
    kinds = (nn.Linear, Conv1D)
    # The weights as they are: loading an adapter may change them.
    before = {name: part.weight.detach().clone() for name, part in model.named_modules() if isinstance(part, kinds)}
    model = _with_adapter(model, folder)
    tensors: dict[str, Tensor] = {}
    found: list[Converted] = []
    for name, layer in model.base_model.model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if name not in before:
            raise AdapterError(f"{folder}: {name} is not a linear layer, and cannot be converted")
        layer.merge()
        part = layer.get_base_layer()
        delta = part.weight.detach() - before.pop(name)
        if isinstance(part, Conv1D):
            delta = delta.T
        a, b, error = low_rank(delta, rank, tolerance)
        if error > tolerance:
            raise AdapterError(
                f"{folder}: {name}: at rank {len(a)} the error is {error:.3g} of the change, above the tolerance of "
                f"{tolerance:g}: allow a larger --rank or --tolerance"
            )
        found.append(Converted(name, len(a), error))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    if not found:
        raise AdapterError(f"{folder}: it changes no linear layer")
    given = json.loads((folder / CONFIG_FILE).read_text())
    saved = {key: value for key, value in load_file(folder / WEIGHTS_FILE).items() if _is_whole(key, given)}
    largest = max(each.rank for each in found)
    config = {
        "peft_type": "LORA",
        "r": largest,
        "lora_alpha": largest,
        "target_modules": [each.module for each in found],
        "rank_pattern": {each.module: each.rank for each in found},
        "alpha_pattern": {each.module: each.rank for each in found},
        "modules_to_save": given.get("modules_to_save"),
        "base_model_name_or_path": given.get("base_model_name_or_path"),
        "fan_in_fan_out": given.get("fan_in_fan_out", False),
        "task_type": given.get("task_type"),
    }
    target.mkdir(parents=True)
    save_file({**tensors, **saved}, target / WEIGHTS_FILE)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    for name in CHAT_FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, target / name)
    return found


def low_rank(delta: Tensor, rank: int, tolerance: float) -> tuple[Tensor, Tensor, float]:
    """Return the best low-rank matrices for a change of a weight, and their error.

    Args:
        delta: ``[out, in]``.
        rank: the largest rank; 0 for as many as needed.
        tolerance: of the error, as a share of the norm of ``delta``.

    Returns:
        A ``[r, in]`` and B ``[out, r]`` of the smallest rank within the tolerance, else of ``rank``; and the error.
    """
    left, values, right = torch.linalg.svd(delta.double(), full_matrices=False)
    squares = values.square()
    total = float(squares.sum())
    if total == 0:
        return torch.zeros(1, delta.shape[1]), torch.zeros(delta.shape[0], 1), 0.0
    lost = (total - squares.cumsum(0)).clamp(min=0).sqrt() / math.sqrt(total)
    real = int((values > _ROUNDING * values[0]).sum())
    needed = min(int((lost > tolerance).sum()) + 1, real)
    kept = min(needed, rank) if rank else needed
    roots = values[:kept].sqrt()
    a, b = roots[:, None] * right[:kept], left[:, :kept] * roots
    error = 0.0 if kept == real else float(lost[kept - 1])
    return a.float().contiguous(), b.float().contiguous(), error


def _is_whole(key: str, config: dict[str, Any]) -> bool:
    """Return whether a tensor is a whole weight of one of ``modules_to_save``."""
    path = key.removeprefix("base_model.model.").rpartition(".")[0]
    return any(path.endswith(name) for name in config.get("modules_to_save") or [])


def compare(folder: Path, base: Path, prompt: str, tokens: int) -> Comparison:
    """Answer a prompt greedily in fp32, here and by PEFT.

    Args:
        folder: of the adapter.
        base: of its base.
        prompt: text, which is continued as it is.
        tokens: how many to compute.

    Raises:
        AdapterError: the adapter cannot be served, PEFT cannot load it, or the request fails.
    """
    by_peft: list[int] = []
    difference = 0.0
    with _quiet():
        token_ids = AutoTokenizer.from_pretrained(base, local_files_only=True)(prompt)["input_ids"]
        own, logprobs = _own_answer(folder, base, token_ids, tokens)
    with _quiet(), torch.inference_mode():
        model = _with_adapter(_load(base), folder)
        for token, logprob in zip(own, logprobs, strict=True):
            ids = torch.tensor([[*token_ids, *by_peft]])
            expected = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
            by_peft.append(int(expected.argmax()))
            if by_peft[-1] != token:
                break
            difference = max(difference, abs(logprob - float(expected[token])))
    return Comparison(own, by_peft, difference)


def _own_answer(folder: Path, base: Path, token_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
    model = ModelSettings(str(base), dtype="float32", max_model_len=len(token_ids) + tokens)
    replica = build_replica(Settings(model, EngineSettings(host_memory_bytes=0), AdapterSettings()))
    engine = replica.engine
    try:
        ref = reference(folder.name, folder, replica.sizes.geometry, "float32")
        adapter, start = adapted(ref, replica.sizes.geometry, token_ids)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1)
        now_s = MonotonicClock().now()
        request = Request(RequestId("check"), token_ids, sampling, now_s, adapter, adapter_start=start)
        answer = list(run_alone(engine, request))
    except GenerationError as error:
        raise AdapterError(str(error)) from error
    finally:
        engine.close()
    return [token.token_id for token in answer], [dict(token.top)[token.token_id] for token in answer]


def _load(base: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _with_adapter(model: PreTrainedModel, folder: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except Exception as error:  # of many kinds
        raise AdapterError(f"{folder}: PEFT cannot load it: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars and warnings of libraries off the terminal."""
    transformers_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.enable_progress_bar()
