"""Measures the TTFT of further questions about an image: ``python -m benchmarks.image_questions``.

The model has LLaVA's shape with random weights, and an image becomes 576 tokens. The same image is asked about again,
with other words behind it, by the base, and then by an adapter that leaves the tower alone. All questions are answered
in one process, one at a time, the three kinds in turns.
"""

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.harness import THREADS, print_setup, print_table
from lorikeet.adapters.store import reference
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.images import ImageTensor, PromptImage
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica, build_replica
from lorikeet.engine.driver import wait_for_work

_SIDE = 336
_PATCH = 14
_IMAGE = 999
"""The placeholder's token."""
_WORDS = 24
LIMIT = 0.3
"""Largest ratio of TTFT of the second question to that of the first that is wanted."""


def write_model(folder: Path, layers: int) -> None:
    """Write a random model whose tower has ``layers`` layers, and an adapter of its language model."""
    vision = CLIPVisionConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=8, image_size=_SIDE,
        patch_size=_PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=_IMAGE)
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder / "base")
    targets = [
        name for name, _ in model.named_modules() if "language_model" in name and name.endswith(("q_proj", "v_proj"))
    ]
    get_peft_model(model, LoraConfig(r=16, target_modules=targets)).save_pretrained(str(folder / "adapter"))


def image_of(seed: int) -> PromptImage:
    """Return a random image."""
    pixels = np.random.default_rng(seed).standard_normal((1, 3, _SIDE, _SIDE), dtype=np.float32)
    tensor = ImageTensor("float32", pixels.shape, pixels.tobytes())
    return PromptImage(seed.to_bytes(32, "little"), 4, (_SIDE // _PATCH) ** 2, {"pixel_values": tensor})


class Engine:
    """An engine in this process.

    Args:
        replica: its parts.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._clock = MonotonicClock()
        self._asked = 0

    def ask(self, image: PromptImage, adapter: AdapterRef | None) -> float:
        """Ask a new question about an image, and return its TTFT in seconds.

        Raises:
            RuntimeError: the request failed.
        """
        self._asked += 1
        chance = random.Random(self._asked)
        prompt = [1, 2, 3, 4] + [_IMAGE] * image.length + chance.choices(range(5, _IMAGE), k=_WORDS)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        began_s = self._clock.now()
        request = Request(RequestId(f"{self._asked}"), prompt, sampling, began_s, adapter, images=(image,))
        engine = self.replica.engine
        engine.submit(request)
        ttft_s = 0.0
        while engine.has_requests:
            outputs = engine.step()
            ttft_s = ttft_s or (self._clock.now() - began_s if outputs.tokens else 0.0)
            for event in outputs.events:
                if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                    raise RuntimeError(event.error)
            if not engine.is_busy:
                wait_for_work(engine, self._clock, math.inf)
        return ttft_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="images")
    parser.add_argument("--layers", type=int, default=12, help="layers of the tower")
    options = parser.parse_args(arguments)
    print_setup()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.layers)
        model = ModelSettings(model=str(folder / "base"), dtype="float32", max_model_len=1024)
        memory = EngineSettings(max_num_seqs=4, threads=THREADS, memory_bytes=2**28, host_memory_bytes=0)
        replica = build_replica(Settings(model, memory))
        engine = Engine(replica)
        try:
            adapter = reference("adapter", folder / "adapter", replica.sizes.geometry)
            for asked_by in (None, adapter):  # The first questions load the adapter and warm up.
                engine.ask(image_of(0), asked_by)
            times: dict[str, list[float]] = {"first": [], "second": [], "by another adapter": []}
            for number in range(1, options.rounds + 1):
                image = image_of(number)
                for kind, asked_by in zip(times, (None, None, adapter), strict=True):
                    times[kind].append(engine.ask(image, asked_by))
            stats = replica.engine.stats().images
        finally:
            replica.engine.close()
    first = statistics.median(times["first"])
    rows = [
        [kind, f"{1e3 * statistics.median(each):.1f}", f"{statistics.median(each) / first:.2f}"]
        for kind, each in times.items()
    ]
    print_table("Questions about an image", ["question", "TTFT, ms (median)", "of the first"], rows)
    print(f"tower: {1e3 * stats.tower_s / stats.computed:.1f} ms an image")
    print(f"the tower ran {stats.computed} times for {options.rounds + 1} images")


if __name__ == "__main__":
    main()
