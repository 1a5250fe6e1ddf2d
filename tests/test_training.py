"""The sync of a live PEFT model: over shared memory and in a body it is the version that a saved folder would be."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from benchmarks.harness import RunningServer, running_server
from lorikeet.adapters.checkpoint import begin_digest
from lorikeet.adapters.shared_memory import FOLDER
from lorikeet.training import SharedWeights, SyncError, _bytes, _header, _ordered, sync
from tests.support.api_server import TOKENIZER
from tests.support.small_model import model_folder  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811 - the fixture
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(TOKENIZER.to_str())
    return folder


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("server")
    flags = [str(base), "--dtype", "float32", "--memory", "16MiB", "--store-dir", str(scratch / "store")]
    with running_server(flags, scratch / "log") as running:
        yield running


@pytest.fixture
def policy(base: Path) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def digest_of(policy: Any, folder: Path) -> str:
    policy.save_pretrained(folder)
    return digest_of_folder(folder)


def digest_of_folder(folder: Path) -> str:
    digest = begin_digest(folder / "adapter_config.json")
    digest.update((folder / "adapter_model.safetensors").read_bytes())
    return digest.hexdigest()


def train(policy: Any, name: str) -> None:
    """Change one tensor."""
    with torch.no_grad():
        next(parameter for key, parameter in policy.named_parameters() if name in key).add_(0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_is_the_one_that_safetensors_writes(dtype: torch.dtype) -> None:
    tensors = {
        "b": torch.ones(3, 2, dtype=dtype),
        "a": torch.zeros(5, dtype=torch.float32),
        "c": torch.ones(1, dtype=dtype),
    }
    header, size = _header(tensors)
    content = header + b"".join(_bytes(tensors[name]).tobytes() for name in _ordered(tensors))
    assert content == save(tensors, {"format": "pt"})
    assert len(content) == size


def test_a_sync_makes_the_version_of_a_saved_folder(server: RunningServer, policy: Any, tmp_path: Path) -> None:
    in_body = sync(policy, "in-body", server.url)
    with SharedWeights() as shared:
        first = sync(policy, "shared", server.url, shared_memory=shared)
        assert first.digest == in_body.digest == digest_of(policy, tmp_path / "first")
        train(policy, "lora_B")
        second = sync(policy, "shared", server.url, shared_memory=shared)
        assert (second.digest, second.changed) == (digest_of(policy, tmp_path / "second"), 1)
        assert sync(policy, "shared", server.url, shared_memory=shared).changed == 0
        other = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        policy.add_adapter("other", other)
        third = sync(policy, "other", server.url, adapter="other", shared_memory=shared)
        policy.save_pretrained(tmp_path, selected_adapters=["other"])
        assert third.digest == digest_of_folder(tmp_path / "other")
        assert (FOLDER / shared.name).exists()
    assert not (FOLDER / shared.name).exists()
    assert sync(policy, "in-body", server.url).digest == second.digest


def test_many_loops_sync_at_once(server: RunningServer, policy: Any) -> None:
    digests: dict[str, str] = {}

    def loop(name: str) -> None:
        digests[name] = sync(policy, name, server.url).digest

    threads = [threading.Thread(target=loop, args=(f"loop-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4
    assert len(set(digests.values())) == 1


def test_what_the_server_refuses_is_an_error_with_its_words(server: RunningServer, policy: Any) -> None:
    with torch.no_grad():
        next(parameter for key, parameter in policy.named_parameters() if "lora_B" in key).fill_(torch.nan)
    with pytest.raises(SyncError, match="NaN or infinity"):
        sync(policy, "broken", server.url)
    with pytest.raises(SyncError, match=r"127\.0\.0\.1:1"):
        sync(policy, "nowhere", "http://127.0.0.1:1")
