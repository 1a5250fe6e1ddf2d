"""What a server has is compared with a folder, and with a live model of PEFT."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lorikeet.adapters.content import compare, read_content
from lorikeet.adapters.errors import AdapterError
from lorikeet.cli.app import app
from lorikeet.verification import ServerDiffers, compare_with_server
from tests.support.live import write_adapter
from tests.support.served import make_model, serving

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def changed(folder: Path, target: Path, at: int = 0) -> tuple[Path, str]:
    """Copy an adapter and change one tensor of it; return the folder and the tensor's name."""
    shutil.copytree(folder, target)
    tensors = load_file(target / WEIGHTS)
    name = sorted(tensors)[at]
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, target / WEIGHTS)
    return target, name


@pytest.mark.slow
async def test_the_adapter_of_a_server_is_compared_with_a_folder_and_with_a_live_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    adapter = write_adapter(tmp_path / "mine", model, seed=3)
    other, name = changed(adapter, tmp_path / "other")
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
    flags = ("--dtype", "float32", "--lora-modules", f"mine={adapter}", "--adapter-dir", str(tmp_path))

    def verify(folder: Path, url: str, *more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["adapters", "verify", "mine", str(folder), "--url", url, *more])
        return result.exit_code, result.output

    async with serving(model, tmp_path / "home", *flags) as server:
        url = str(server.http.base_url).rstrip("/")
        digest = (await server.http.get("/v1/adapters/mine")).json()["digest"]
        content = (await server.http.get("/v1/adapters/mine/content")).json()
        assert content["digest"] == digest
        assert set(content["tensors"]) == set(load_file(adapter / WEIGHTS))
        assert (await server.http.get("/v1/adapters/nobody/content")).status_code == 404

        code, said = await asyncio.to_thread(verify, adapter, url)
        assert (code, digest in said) == (0, True), said
        code, said = await asyncio.to_thread(verify, other, url, "--json", "-")
        found = json.loads(said)
        assert (code, found["same"], found["differing"]) == (1, False, [name])
        assert found["folder_digest"] != digest
        code, said = await asyncio.to_thread(verify, other, url)
        assert (code, f"1 of {len(content['tensors'])} tensors differ: {name}" in said) == (1, True), said
        code, said = await asyncio.to_thread(verify, tmp_path / "nothing", url)
        assert (code, CONFIG in said or WEIGHTS in said) == (1, True), said

        live.train()
        same = await asyncio.to_thread(compare_with_server, live, "mine", url, expect_digest=digest)
        assert live.training
        assert same.is_same(1e-4)
        assert same.base_difference is not None
        assert same.base_difference > 10 * same.difference
        assert same.fingerprint.endswith(digest[:12])
        # The server that answers as the base is found, and so are other weights.
        as_base = await asyncio.to_thread(compare_with_server, live, "tiny", url)
        assert not as_base.is_same(1e-4)
        assert as_base.base_difference is not None
        assert as_base.base_difference < 1e-4
        with torch.no_grad():
            for key, weight in live.named_parameters():
                if "lora_B" in key:
                    weight.mul_(2)
        assert not (await asyncio.to_thread(compare_with_server, live, "mine", url)).is_same(1e-4)
        with pytest.raises(ServerDiffers, match="409"):
            await asyncio.to_thread(compare_with_server, live, "mine", url, expect_digest="0" * 64)
        with pytest.raises(ServerDiffers, match="does not exist"):
            await asyncio.to_thread(compare_with_server, live, "nobody", url)
    with pytest.raises(ServerDiffers, match=url):
        await asyncio.to_thread(compare_with_server, live, "mine", url)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("content")
    return folder, write_adapter(folder / "one", make_model(folder / "tiny"), seed=3)


def test_a_file_with_another_header_has_the_same_content(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, one = folders
    shutil.copytree(one, tmp_path / "two")
    save_file(load_file(one / WEIGHTS), tmp_path / "two" / WEIGHTS, {"adapter_config": "{}"})
    assert (one / WEIGHTS).read_bytes() != (tmp_path / "two" / WEIGHTS).read_bytes()
    assert compare(read_content(one), read_content(tmp_path / "two")).are_same


def test_shards_have_the_content_of_the_whole_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, one = folders
    shutil.copytree(one, tmp_path / "two")
    (tmp_path / "two" / WEIGHTS).unlink()
    tensors = load_file(one / WEIGHTS)
    shards = {f"adapter_model-0000{at + 1}-of-00002.safetensors": sorted(tensors)[at::2] for at in range(2)}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "two" / shard)
    places = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / "two" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    assert compare(read_content(one), read_content(tmp_path / "two")).are_same


@pytest.mark.parametrize("change", [{"lora_alpha": 99}, {"use_rslora": True}])
def test_settings_that_change_the_weights_are_named(
    folders: tuple[Path, Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    _, one = folders
    shutil.copytree(one, tmp_path / "two")
    config = json.loads((one / CONFIG).read_text()) | {"description": "not a setting"} | change
    (tmp_path / "two" / CONFIG).write_text(json.dumps(config))
    found = compare(read_content(one), read_content(tmp_path / "two"))
    assert set(found.settings) == set(change)
    assert [found.differing, found.only_first, found.only_second] == [[], [], []]


def test_tensors_of_one_copy_only_and_other_shapes_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, one = folders
    shutil.copytree(one, tmp_path / "two")
    tensors = load_file(one / WEIGHTS)
    first, second, *_ = sorted(tensors)
    tensors["more"] = tensors.pop(first)
    tensors[second] = tensors[second].T.copy()
    save_file(tensors, tmp_path / "two" / WEIGHTS)
    found = compare(read_content(one), read_content(tmp_path / "two"))
    assert (found.only_first, found.only_second, found.differing) == ([first], ["more"], [second])
    (tmp_path / "two" / WEIGHTS).write_bytes(b"cut")
    with pytest.raises(AdapterError, match=WEIGHTS):
        read_content(tmp_path / "two")
