"""Runs transformers, with PEFT for adapters, as a backend of the offline benchmark."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.offline_backends import OfflineBatch, OfflineResult


class PeftBackend:
    """Runs transformers' ``generate`` on the whole batch.

    Several adapters are mixed in one call by ``adapter_names``, which is PEFT's way to serve them together
    (https://huggingface.co/docs/peft/developer_guides/lora, "inference with different LoRA adapters in the same
    batch"). Requests are sorted by adapter, as the engine's are. A single adapter is activated, so that PEFT need not
    split batches. Without adapters PEFT is not used.
    """

    name = "peft"

    def __init__(self, model_folder: Path, dtype: torch.dtype, folders: Sequence[Path], device: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
        self._names = [folder.name for folder in folders]
        self.versions = {name: version(name) for name in ("transformers", *(["peft"] if folders else []))}
        if folders:
            from peft import PeftModel

            first, *others = folders
            model = PeftModel.from_pretrained(model, first, adapter_name=first.name, autocast_adapter_dtype=False)
            for folder in others:
                model.load_adapter(folder, adapter_name=folder.name, autocast_adapter_dtype=False)
        self._model = model.to(device, dtype).eval()

    def run(self, work: OfflineBatch) -> OfflineResult:
        """Run one batch with greedy sampling. Either all requests have an adapter or none has."""
        start_s = time.monotonic()
        order = sorted(range(len(work.prompts)), key=lambda i: work.adapters[i] or 0)
        prompts = torch.tensor([work.prompts[i] for i in order], device=self._model.device)
        times_s: list[float] = []

        def record(*_: Any, **__: Any) -> torch.Tensor:
            times_s.append(time.monotonic())
            return torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)

        with torch.inference_mode():
            output = self._model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=work.output_tokens,
                max_new_tokens=work.output_tokens,
                stopping_criteria=[record],
                **self._choice([work.adapters[i] for i in order]),
            )
        rows = output[:, prompts.shape[1] :].tolist()
        seconds = time.monotonic() - start_s
        by_request = dict(zip(order, rows, strict=True))
        decoded = len(prompts) * (len(times_s) - 1)
        decode_tok_s = decoded / (times_s[-1] - times_s[0]) if decoded else None
        return OfflineResult(seconds, [by_request[i] for i in range(len(order))], decode_tok_s)

    def close(self) -> None:
        """Do nothing, because the model is freed with this object."""

    def _choice(self, adapters: Sequence[int | None]) -> dict[str, Any]:
        """Return the arguments of ``generate`` that choose the adapters."""
        if len(self._names) < 2:
            return {}
        return {"adapter_names": [self._names[index] for index in adapters if index is not None]}
