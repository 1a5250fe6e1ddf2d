"""The public traces that lines use, unpacked."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_DATA = Path(__file__).resolve().parents[1] / "data"

AZURE_CONVERSATION = "azure_llm_inference_conv_2023.csv"
MOONCAKE_CONVERSATION = "mooncake_conversation_2025.jsonl"


@contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """Yield a file with one of the traces, for as long as it is needed."""
    with TemporaryDirectory(prefix="lorikeet-trace-") as folder:
        file = Path(folder) / name
        file.write_bytes(gzip.decompress((_DATA / f"{name}.gz").read_bytes()))
        yield file
