"""Makes the folder from which a GGUF file is served: ``config.json`` and tokenizer, and a link to the file.

transformers, which converts the tokenizer, is imported only for that.
"""

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from lorikeet.core.text import install_command
from lorikeet.models.default import split_digits, whole_folder
from lorikeet.models.gguf import GGUF_FILE, GgufFile, gguf_config, read_gguf
from lorikeet.models.json_section import ModelConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def prepare_gguf(path: Path, cache_dir: Path, tokenizer: Path | None, on_stage: Callable[[str], None]) -> Path:
    """Return the model folder of a GGUF file.

    It is made once for each file, tokenizer and modification time.

    Args:
        path: the file.
        cache_dir: folder that gets the model folder. It is created if missing.
        tokenizer: folder of another tokenizer. None uses the file's tokenizer.
        on_stage: function called with a few words before the tokenizer is converted.

    Raises:
        ModelConfigError: the file cannot be read, its model is not supported, or its tokenizer cannot be converted.
    """
    file = read_gguf(path.resolve())
    config = gguf_config(file)
    status = path.stat()
    content = json.dumps([str(file.path), status.st_size, status.st_mtime_ns, str(tokenizer or ""), config])
    target = cache_dir / f"{path.stem}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    with whole_folder(target) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is None:
            on_stage(f"converting the tokenizer of {path.name} (once)")
            _in_another_process(file, folder)
        else:
            _copy_tokenizer(tokenizer, folder)
        (folder / GGUF_FILE).symlink_to(file.path)
    return target


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise ModelConfigError(f"tokenizer {source}: has no tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _in_another_process(file: GgufFile, folder: Path) -> None:
    """Convert the tokenizer in another process, since the conversion imports torch."""
    if find_spec("gguf") is None:
        raise ModelConfigError(f"{file.path}: converting its tokenizer needs gguf: run `{install_command('gguf')}`")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(_convert_tokenizer, file, folder).result()
        except Exception as error:  # transformers documents no exceptions, so all kinds are caught.
            raise ModelConfigError(
                f"{file.path}: its tokenizer cannot be converted ({type(error).__name__}: {error}); name the folder of "
                "another with --tokenizer"
            ) from error


def _convert_tokenizer(file: GgufFile, folder: Path) -> None:
    from transformers import AutoTokenizer

    path = file.path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    if file.metadata.get("tokenizer.ggml.pre") == "smollm":
        split_digits(folder)
