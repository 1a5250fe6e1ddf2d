"""What a model may be called, and what clients then call it."""

from pathlib import Path

import pytest

from lorikeet.config import ConfigError, ModelSettings
from lorikeet.models import default
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.model_folder import prepare_model
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import write_model
from tests.support.api_server import TOKENIZER


def stages(settings: ModelSettings) -> tuple[list[str], object]:
    told: list[str] = []
    return told, prepare_model(settings, told.append)


def test_a_folder_is_served_under_its_name_and_understood_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    told, model = stages(ModelSettings(model=f"{tmp_path}/llama/"))
    folder = tmp_path.resolve() / "llama"
    assert model == (folder, "llama", ("llama",), (f"{tmp_path}/llama/", str(folder)), "")
    assert told == []


def test_served_names_replace_the_folders_name(tmp_path: Path) -> None:
    _, model = stages(ModelSettings(model=str(tmp_path), served_names=("one", "two")))
    assert model[2] == ("one", "two")  # type: ignore[index]


def test_the_default_model_is_taken_from_the_cache_without_a_word(tmp_path: Path) -> None:
    (tmp_path / default.NAME).mkdir()
    told, model = stages(ModelSettings(cache_dir=str(tmp_path)))
    assert model[:3] == (tmp_path / default.NAME, default.NAME, (default.NAME,))  # type: ignore[index]
    assert told == []


def test_a_gguf_file_is_served_under_its_name_with_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    kind = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    file = write_model(tmp_path / "tiny.gguf", make_checkpoint(tmp_path / "made", "qwen2", **kind), "qwen2", {})
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    settings = ModelSettings(model=str(file), cache_dir=str(tmp_path), tokenizer=str(tokenizer))
    with pytest.raises(ModelConfigError, match=r"has no tokenizer\.json"):
        stages(settings)
    TOKENIZER.save(str(tokenizer / "tokenizer.json"))
    told, model = stages(settings)
    path = model[0]  # type: ignore[index]
    assert model[1:] == ("tiny", ("tiny",), (str(file), str(file)), "")  # type: ignore[index]
    assert told == []
    assert (path / "model.gguf").resolve() == file.resolve()
    assert (path / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    assert stages(settings)[1] == model


def test_tokenizer_needs_a_gguf_file_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer: is for GGUF files"):
        stages(ModelSettings(model=str(tmp_path), tokenizer="org/name"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"is a file, but not a \.gguf file"):
        stages(ModelSettings(model=str(tmp_path / "model.bin")))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~nobody/x", "nowhere", "a/b/c"])
def test_neither_folder_nor_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder, and not a hub id"):
        stages(ModelSettings(model=name))
