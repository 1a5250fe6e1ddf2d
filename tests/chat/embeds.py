"""Prompt embeddings as requests carry them."""

import base64
import io
from typing import Any

import torch

from tests.support.fakes import HIDDEN


def saved(value: Any, **more: Any) -> str:
    """What a client sends."""
    file = io.BytesIO()
    torch.save(value, file, **more)
    return base64.b64encode(file.getvalue()).decode()


def tensor(tokens: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
