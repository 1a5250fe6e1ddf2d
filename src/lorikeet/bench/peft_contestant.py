"""transformers and PEFT as the other side of a comparison."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lorikeet.bench.contestants import Outcome, Work


class PeftContestant:
    """transformers' ``generate`` on a PEFT model, the adapters of a batch mixed by ``adapter_names``.

    One call takes the whole batch: that is PEFT's way to serve several adapters at once
    (https://huggingface.co/docs/peft/developer_guides/lora, "inference with different LoRA adapters in the same
    batch"). Requests are sorted by adapter, as the engine's are.
    """

    name = "peft"

    def __init__(self, model_folder: Path, dtype: torch.dtype, folders: Sequence[Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
        self._names = [folder.name for folder in folders]
        model = PeftModel.from_pretrained(base, folders[0], adapter_name=self._names[0], autocast_adapter_dtype=False)
        for name, folder in zip(self._names[1:], folders[1:], strict=True):
            model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
        self._model = model.to(dtype).eval()

    def run(self, work: Work) -> Outcome:
        """Run one batch, greedily."""
        start_s = time.monotonic()
        order = sorted(range(len(work.prompts)), key=lambda i: work.adapters[i])
        prompts = torch.tensor([work.prompts[i] for i in order])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                adapter_names=[self._names[work.adapters[i]] for i in order],
                do_sample=False,
                min_new_tokens=work.output_tokens,
                max_new_tokens=work.output_tokens,
            )
        rows = output[:, prompts.shape[1] :].tolist()
        seconds = time.monotonic() - start_s
        by_request = dict(zip(order, rows, strict=True))
        return Outcome(seconds, [by_request[i] for i in range(len(order))])
