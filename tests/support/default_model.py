"""The default model, converted once for all tests, and for all processes that run them."""

import fcntl
import os
from pathlib import Path

import pytest

from lorikeet.models.default import prepare_default_model


@pytest.fixture(scope="session")
def default_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the converted model."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done_file = shared / "default-model-cache", shared / "default-model-done"
    with (shared / "default-model-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done_file.exists():
            folder.mkdir()
            heard: list[tuple[str, int, int]] = []
            prepare_default_model(folder, lambda stage, done, total: heard.append((stage, done, total)))
            assert [done for _, done, _ in heard] == [0, 1, 2, 3]
            done_file.touch()
    return folder
