"""Files that change while they are read."""

import os
from pathlib import Path

import pytest

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import reference
from lorikeet.adapters.weights import load_weights
from tests.adapters.builders import geometry, write_adapter


def test_file_truncated_during_read_is_an_error_naming_the_tensor(tmp_path: Path) -> None:
    ref = reference("x", write_adapter(tmp_path / "x"), geometry())
    weights = load_weights(ref, geometry(), "float32")
    next(weights)
    os.truncate(tmp_path / "x" / "adapter_model.safetensors", ref.weight_bytes // 2)
    with pytest.raises(
        AdapterError, match=r"adapter 'x'.*adapter_model.safetensors: was truncated while tensor .*lora"
    ):
        list(weights)
