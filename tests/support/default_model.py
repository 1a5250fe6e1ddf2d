"""The default model, converted once for all tests."""

import functools
from pathlib import Path

import pytest

from lorikeet.models.default import prepare_default_model


@pytest.fixture(scope="session")
def default_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the converted model."""
    import gguf  # here, as this file is imported before the number of threads is set

    folder = tmp_path_factory.mktemp("cache")
    heard: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        # The reader of GGUF files opens the file, and names all its tensors, again and again.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        prepare_default_model(folder, lambda stage, done, total: heard.append((stage, done, total)))
    assert [done for _, done, _ in heard] == [0, 1, 2, 3]
    return folder
