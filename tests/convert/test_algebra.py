"""Adapters are merged, compared and compressed by the commands, against PEFT's own arithmetic."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.cli.app import app
from lorikeet.convert.folder import LoraFolder, LowRank, read_lora, write_lora
from lorikeet.models import default
from tests.adapters.builders import LAYERS, geometry, peft_adapter, tiny_llama

IDS = torch.tensor([[3, 9, 27, 17, 51]])
TARGETS = {"a": ["q_proj", "v_proj"], "b": ["q_proj", "down_proj"]}


def run(*words: object) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["adapters", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: object) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["adapters", *map(str, words)])
    assert done.exit_code != 0
    return done.output


def product(folder: LoraFolder, name: str) -> Tensor:
    b, a = folder.modules[name].factors()
    return b @ a


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for seed, (name, targets) in enumerate(TARGETS.items()):
        peft_adapter(tmp_path / name, seed, r=4, lora_alpha=6 + seed, target_modules=targets)
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize("method", ["cat", "svd", "linear"])
def test_a_merged_adapter_is_that_of_peft(method: str, two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    output = run("merge", f"{a}*0.7+{b}*-0.3", tmp_path / "merged", "--method", method, "--rank", 3)
    model = PeftModel.from_pretrained(tiny_llama(), str(a), adapter_name="a")
    model.load_adapter(str(b), adapter_name="b")
    rank = {"svd_rank": 3} if method == "svd" else {}
    model.base_model.add_weighted_adapter(["a", "b"], [0.7, -0.3], "mixed", combination_type=method, **rank)
    model.set_adapter("mixed")
    ours = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "merged")).eval()
    with torch.inference_mode():
        torch.testing.assert_close(ours(IDS).logits, model.eval()(IDS).logits, rtol=1e-4, atol=1e-4)
    described = describe_folder(tmp_path / "merged", DescribeOptions(geometry(), read_weights=True))
    assert not described.warnings
    assert {each.rank for each in described.modules} == {"cat": {4, 8}, "svd": {3}, "linear": {4}}[method]
    assert ("largest error 0\n" in output) == (method == "cat")


def test_a_mixture_is_written_into_its_base(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    base = _base(tmp_path)
    (base / "tokenizer_config.json").write_text("{}")
    run("merge", f"{a}*0.5+{b}", tmp_path / "whole", "--base", base)
    run("merge", f"{a}*0.5+{b}", tmp_path / "merged")
    _check_same(tmp_path / "whole", tmp_path / "merged")
    assert (tmp_path / "whole" / "tokenizer_config.json").read_text() == "{}"


def test_one_adapter_is_written_into_its_base(two: tuple[Path, Path], tmp_path: Path) -> None:
    run("merge", two[0], tmp_path / "whole", "--base", _base(tmp_path))
    _check_same(tmp_path / "whole", two[0])


def _check_same(base: Path, adapter: Path) -> None:
    """Check that a base computes what an adapter does on its own base."""
    merged = AutoModelForCausalLM.from_pretrained(base).eval()
    adapted = PeftModel.from_pretrained(tiny_llama(), str(adapter)).eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_merged_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    peft_adapter(tmp_path / "norms", r=4, modules_to_save=["norm"])
    peft_adapter(tmp_path / "wide", r=8)
    out = tmp_path / "out"
    assert "is beside A and B, and cannot be mixed" in refusal("merge", f"{a}+{tmp_path / 'norms'}", out)
    assert "linear needs equal ranks, not 4, 8" in refusal(
        "merge", f"{a}+{tmp_path / 'wide'}", out, "--method", "linear"
    )
    assert "name it with --base" in refusal("merge", a, out)
    assert "must be one of cat, svd, linear" in refusal("merge", f"{a}+{b}", out, "--method", "ties")
    assert "is not a mixture" in refusal("merge", f"{a}*x+{b}", out)
    assert not out.exists()
    assert "exists already" in refusal("merge", f"{a}+{b}", b)


def test_the_default_model_can_be_named(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = default.default_cache_dir() / default.NAME
    tiny_llama().save_pretrained(base)
    assert f"fits:       {base}" in run("inspect", two[0], "--base", default.NAME)
    assert "no such folder" in refusal("inspect", two[0], "--base", f"{default.NAME}-2")


def test_lora_that_is_served_is_not_converted(two: tuple[Path, Path], tmp_path: Path) -> None:
    output = refusal("convert", two[0], tmp_path / "out", "--base", _base(tmp_path))
    assert "is LoRA and served as it is" in output
    assert not (tmp_path / "out").exists()


def test_a_difference_is_of_the_products(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    assert "the adapters add the same" in run("diff", a, a)
    run("diff", a, b, "--json", tmp_path / "diff.json")
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["config"] == {"lora_alpha": [6, 7]}
    one = read_lora(a)
    two_ = read_lora(b)
    by_name = {each["name"]: each for each in found["modules"]}
    assert by_name.keys() == one.modules.keys() | two_.modules.keys()
    name = "model.layers.1.self_attn.q_proj"
    change = product(one, name)
    expected = float((product(two_, name) - change).norm() / change.norm())
    assert by_name[name]["relative"] == pytest.approx(expected, rel=1e-9)
    assert by_name["model.layers.0.self_attn.v_proj"] == {
        "name": "model.layers.0.self_attn.v_proj", "ranks": [4, 0], "relative": None,
    }  # fmt: skip
    shown = run("diff", a, b)
    assert "lora_alpha: 6 → 7" in shown
    assert f"{LAYERS} modules in one only" in shown


def test_defaults_of_peft_are_not_a_difference(two: tuple[Path, Path], tmp_path: Path) -> None:
    folder = read_lora(two[0])
    write_lora(tmp_path / "bare", folder.modules, {**folder.kept_config, "lora_alpha": folder.config["lora_alpha"]})
    config = json.loads((tmp_path / "bare" / "adapter_config.json").read_text())
    assert folder.config["bias"] == "none"
    assert "bias" not in config
    run("diff", two[0], tmp_path / "bare", "--json", tmp_path / "diff.json")
    assert json.loads((tmp_path / "diff.json").read_text())["config"] == {}


def test_the_same_tensor_of_all_layers_is_one_row_of_a_difference(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        peft_adapter(tmp_path / name, seed, r=4, use_dora=True, target_modules=["q_proj"])
    shown = run("diff", tmp_path / "a", tmp_path / "b")
    assert shown.count("q_proj") == 2
    assert shown.count(f"0-{LAYERS - 1}") == 2


def test_a_factor_moved_from_alpha_to_b_makes_no_difference(two: tuple[Path, Path], tmp_path: Path) -> None:
    run("merge", f"{two[0]}*0.5+{two[0]}*0.5", tmp_path / "again", "--method", "svd")
    run("diff", two[0], tmp_path / "again", "--json", tmp_path / "diff.json")
    found = json.loads((tmp_path / "diff.json").read_text())
    assert max(each["relative"] for each in found["modules"]) < 1e-6


def _base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_compressed_adapters_share_a_and_have_the_stated_error(tmp_path: Path) -> None:
    folders = [tmp_path / f"a{seed}" for seed in range(3)]
    for seed, folder in enumerate(folders):
        peft_adapter(folder, seed, r=4 + 2 * seed)
    run("compress", *folders, "--into", tmp_path / "out", "--rank", 5, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    made = [read_lora(tmp_path / "out" / folder.name) for folder in folders]
    for name in made[0].modules:
        assert all(torch.equal(each.modules[name].a, made[0].modules[name].a) for each in made)
    for folder, each, row in zip(folders, made, report, strict=True):
        old = read_lora(folder)
        lost = sum(float((product(old, name) - product(each, name)).square().sum()) for name in old.modules)
        total = sum(float(product(old, name).square().sum()) for name in old.modules)
        assert row["error"] == pytest.approx((lost / total) ** 0.5, abs=1e-5)
        assert row["alone"] <= row["error"]
        described = describe_folder(tmp_path / "out" / folder.name, DescribeOptions(geometry(), read_weights=True))
        assert {module.rank for module in described.modules} == {5}
    exact = run("compress", *folders, "--into", tmp_path / "whole", "--rank", 1000)
    assert "3 adapters of rank 18" in exact
    restored = read_lora(tmp_path / "whole" / "a2")
    name = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(product(restored, name), product(read_lora(folders[2]), name), rtol=1e-5, atol=1e-5)


def test_adapters_of_other_sizes_have_no_joint_basis(two: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--into", tmp_path / "out", "--rank", 4)
    assert "have the same name" in refusal("compress", two[0], two[0], *options)
    folder = tmp_path / "other" / "c"
    write_lora(folder, {"model.layers.0.self_attn.q_proj": LowRank(torch.ones(1, 8), torch.ones(8, 1))}, {})
    assert "for different bases" in refusal("compress", two[0], folder, *options)
