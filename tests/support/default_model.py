"""The default model, converted once for all tests."""

from pathlib import Path

import pytest

from lorikeet.models.default import prepare_default_model


@pytest.fixture(scope="session")
def default_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the converted model."""
    folder = tmp_path_factory.mktemp("cache")
    heard: list[tuple[str, int, int]] = []
    prepare_default_model(folder, lambda stage, done, total: heard.append((stage, done, total)))
    assert [done for _, done, _ in heard] == [0, 1, 2, 3]
    return folder
