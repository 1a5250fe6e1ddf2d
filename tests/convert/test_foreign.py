"""Adapters of mlx, llama.cpp and Diffusers are rewritten as PEFT's, with the same delta."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.cli.app import app
from lorikeet.convert.folder import LowRank, read_lora
from tests.adapters.builders import HEADS, KV_HEADS, geometry, peft_adapter, tiny_llama
from tests.models.gguf_files import NAMES

ALPHA = 6
Modules = dict[str, LowRank]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def original(tmp_path: Path) -> Path:
    peft_adapter(tmp_path / "peft", r=4, lora_alpha=ALPHA, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"])
    return tmp_path / "peft"


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp's converter reorders those of q and k: the halves of each head in turns."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def write_mlx(folder: Path, modules: Modules) -> Path:
    folder.mkdir()
    config = {
        "fine_tune_type": "lora",
        "num_layers": 3,
        "model": "x/tiny",
        "lora_parameters": {"rank": 4, "scale": 1.5},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{name}.lora_a": each.a.T.contiguous() for name, each in modules.items()}
    tensors |= {f"{name}.lora_b": each.b.T.contiguous() for name, each in modules.items()}
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def write_older_mlx(folder: Path, modules: Modules) -> Path:
    write_mlx(folder, modules)
    config = {"lora_parameters": {"rank": 4, "alpha": 12, "scale": 0.5, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_gguf(folder: Path, modules: Modules) -> Path:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "lora.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(ALPHA))
    for name, each in modules.items():
        _, _, layer, *path = name.split(".")
        own = NAMES[".".join(path)]
        b = each.b
        if own in ("attn_q", "attn_k"):
            b = interleaved(b, HEADS if own == "attn_q" else KV_HEADS)
        for side, value in (("a", each.a), ("b", b)):
            writer.add_tensor(f"blk.{layer}.{own}.weight.lora_{side}", np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "lora.gguf"


def write_diffusers(folder: Path, modules: Modules) -> Path:
    folder.mkdir()
    tensors = {}
    for name, each in modules.items():
        tensors[f"text_encoder.{name}.lora_linear_layer.down.weight"] = each.a
        tensors[f"text_encoder.{name}.lora_linear_layer.up.weight"] = each.b * (ALPHA / 4)
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    return folder


def write_kohya(folder: Path, modules: Modules) -> Path:
    folder.mkdir()
    tensors = {}
    for name, each in modules.items():
        key = "lora_te_" + name.replace(".", "_")
        tensors |= {f"{key}.lora_down.weight": each.a, f"{key}.lora_up.weight": each.b}
        tensors[f"{key}.alpha"] = torch.tensor(float(ALPHA))
    save_file(tensors, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


WRITERS: dict[str, Callable[[Path, Modules], Path]] = {
    "mlx": write_mlx,
    "older mlx": write_older_mlx,
    "GGUF": write_gguf,
    "Diffusers": write_diffusers,
    "kohya": write_kohya,
}


def convert(source: Path, target: Path, base: Path, *flags: str) -> str:
    done = CliRunner().invoke(app, ["adapters", "convert", str(source), str(target), "--base", str(base), *flags])
    if done.exit_code:
        raise AdapterError(done.output)
    return done.output


@pytest.mark.parametrize("kind", WRITERS)
def test_a_rewritten_adapter_computes_like_the_original(kind: str, original: Path, base: Path, tmp_path: Path) -> None:
    source = read_lora(original)
    place = WRITERS[kind](tmp_path / "foreign", source.modules)
    output = convert(place, tmp_path / "out", base)
    assert "rewritten as PEFT's LoRA on 12 modules, exactly" in output
    found = read_lora(tmp_path / "out")
    assert found.modules.keys() == source.modules.keys()
    for name, each in source.modules.items():
        b, a = each.factors()
        d, c = found.modules[name].factors()
        torch.testing.assert_close(d @ c, b @ a, rtol=1e-5, atol=1e-6)
    described = describe_folder(tmp_path / "out", DescribeOptions(geometry(), read_weights=True))
    assert not described.warnings


def test_doras_of_mlx_keep_their_magnitudes(base: Path, tmp_path: Path) -> None:
    peft_adapter(tmp_path / "peft", r=4, lora_alpha=ALPHA, use_dora=True)
    source = read_lora(tmp_path / "peft")
    folder = write_mlx(tmp_path / "foreign", source.modules)
    tensors = load_file(folder / "adapters.safetensors")
    ending = ".lora_magnitude_vector"
    for key, value in source.others.items():
        tensors[key.removeprefix("base_model.model.").removesuffix(ending) + ".m"] = value
    save_file(tensors, folder / "adapters.safetensors")
    convert(folder, tmp_path / "out", base)
    found = read_lora(tmp_path / "out")
    assert found.config["use_dora"]
    assert found.others.keys() == source.others.keys()
    assert all(torch.equal(value, source.others[key]) for key, value in found.others.items())


def test_a_rank_is_refused_for_formats_that_are_only_rewritten(original: Path, base: Path, tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "mlx", read_lora(original).modules)
    with pytest.raises(AdapterError, match=r"--rank: .* is rewritten as it is; for a lower rank"):
        convert(folder, tmp_path / "out", base, "--rank", "2")
    assert not (tmp_path / "out").exists()


def test_tensors_without_a_place_in_lora_are_refused(original: Path, base: Path, tmp_path: Path) -> None:
    modules = read_lora(original).modules
    folder = write_mlx(tmp_path / "mlx", modules)
    tensors = load_file(folder / "adapters.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(4)}, folder / "adapters.safetensors")
    with pytest.raises(AdapterError, match=r"model\.norm\.weight is neither A, B nor a magnitude"):
        convert(folder, tmp_path / "out", base)
    tensors.pop("model.layers.0.self_attn.q_proj.lora_b")
    save_file(tensors, folder / "adapters.safetensors")
    with pytest.raises(AdapterError, match="q_proj has only one of two"):
        convert(folder, tmp_path / "out", base)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="lora_parameters has no valid scale"):
        convert(folder, tmp_path / "out", base)
    file = write_kohya(tmp_path / "kohya", {"model.layers.7.self_attn.q_proj": next(iter(modules.values()))})
    with pytest.raises(AdapterError, match="is not a linear layer of the base"):
        convert(file, tmp_path / "out", base)
    (tmp_path / "text.bin").write_text("x")
    with pytest.raises(AdapterError, match="not an adapter of mlx, GGUF or Diffusers"):
        convert(tmp_path / "text.bin", tmp_path / "out", base)
    assert not (tmp_path / "out").exists()


def test_a_server_refuses_other_formats_with_the_command_to_convert(original: Path, tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "mlx", read_lora(original).modules)
    with pytest.raises(AdapterError, match=r"adapters\.safetensors: this is not PEFT's format: convert it with"):
        describe_folder(folder, DescribeOptions())


# --- pickles of older PEFT -------------------------------------------------------------------------------------------


def pickled(folder: Path) -> dict[str, Tensor]:
    """Save the weights of a folder as PEFT did before safetensors; return them."""
    tensors = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return tensors


def test_a_pickle_is_rewritten_exactly_and_keeps_the_config(original: Path, tmp_path: Path) -> None:
    before = describe_folder(original, DescribeOptions())
    tensors = pickled(original)
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is ignored.*`lorikeet adapters convert FOLDER OUT`"):
        describe_folder(original, DescribeOptions())
    done = CliRunner().invoke(app, ["adapters", "convert", str(original), str(tmp_path / "out"), "--base", "nowhere"])
    assert done.exit_code == 0, done.output
    assert f"{len(tensors)} tensors rewritten as safetensors" in done.output
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    after = describe_folder(tmp_path / "out", DescribeOptions())
    assert [each.scaling for each in after.modules] == [each.scaling for each in before.modules]


@pytest.mark.parametrize(
    "content", [b"", b"x", b"version https://git-lfs.github.com/spec/v1\n", {"a": 1}, [torch.zeros(1)], Path("x")]
)
def test_a_pickle_of_anything_else_is_refused_and_its_code_is_not_run(
    original: Path, tmp_path: Path, content: object
) -> None:
    pickled(original)
    if isinstance(content, bytes):
        (original / "adapter_model.bin").write_bytes(content)
    else:
        torch.save(content, original / "adapter_model.bin")
    done = CliRunner().invoke(app, ["adapters", "convert", str(original), str(tmp_path / "out")])
    assert done.exit_code == 1, done.output
    assert done.output.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_error_names_the_adapters_in_the_folders_of_a_folder(original: Path) -> None:
    with pytest.raises(AdapterError, match="there is an adapter in peft: name that folder"):
        describe_folder(original.parent, DescribeOptions())
    (original.parent / "second").symlink_to(original)
    with pytest.raises(AdapterError, match=r"adapters are in peft, second$"):
        describe_folder(original.parent, DescribeOptions())
