"""Write the tables of ``docs/adapters.md``: which kinds of adapters are served or converted, as measured.

    python docs/make_adapters.py

Each kind is served over tiny random bases, all in one batch, and compared with PEFT. It takes minutes.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from lorikeet.cli.peft_adapters import convert
from lorikeet.kernels.backends import choose_kernels
from lorikeet.models.config import read_model_config
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import make_base
from tests.models.peft_family import CONVERTED, GPT2_LIKE, LLAMA_LIKE, make
from tests.models.test_library_bases import MAX_MODEL_LEN
from tests.models.test_peft_family import expected, load, serve

PAGE = Path(__file__).parent / "adapters.md"
BASES = {
    "own decoder (qwen3)": ("qwen3-biases", LLAMA_LIKE),
    "transformers (gemma3)": ("gemma3_text", LLAMA_LIKE),
    "transformers (gpt2)": ("gpt2", GPT2_LIKE),
}


def main() -> None:
    """Replace the tables in the page."""
    columns = {name: outcomes(*of) for name, of in BASES.items()}
    kinds = list(dict.fromkeys(kind for column in columns.values() for kind in column))
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {kind} | " + " | ".join(column.get(kind, "–") for column in columns.values()) + " |" for kind in kinds
    ]
    lines += ["", "| type | converted to LoRA of rank | error |", "|---|---|---|", *conversions()]
    text = PAGE.read_text()
    table = "<!-- table -->\n\n" + "\n".join(lines) + "\n\n<!-- end of table -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*<!-- end of table -->", lambda _: table, text, flags=re.DOTALL))


def outcomes(kind: str, every: dict[str, Any]) -> dict[str, str]:
    """Return in words whether each kind of adapter answers as PEFT over a base."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = folder / "base"
        if every is LLAMA_LIKE and kind != "gemma3_text":
            make_checkpoint(base, kind, vocab_size=96)
            geometry, implementation = read_model_config(base).geometry(4), "auto"
        else:
            make_base(base, kind)
            kernels = choose_kernels("auto", torch.float32, torch.device("cpu"))
            model = load_model(base, torch.float32, torch.device("cpu"))
            geometry = TransformersDecoder(model, kernels, MAX_MODEL_LEN).geometry
            implementation = "transformers"
        found = serve(folder, base, geometry, every, implementation)
        return {
            name: "token for token" if answer == expected(peft, asked) else "differs"
            for name, asked, answer, peft in zip(every, *found, strict=True)
        }


def conversions() -> list[str]:
    """Return a row for each type that is converted."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder / "base", "llama", vocab_size=96)
        for name, config in CONVERTED.items():
            make(load(folder / "base"), folder / name, config())
            found = convert(folder / name, folder / f"{name}-lora", folder / "base", 0, 1e-6)
            rank, error = max(each.rank for each in found), max(each.error for each in found)
            rows.append(f"| {name} | {rank}, of weights of rank 48 | {error:.0e} |")
    return rows


if __name__ == "__main__":
    main()
