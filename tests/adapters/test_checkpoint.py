"""Every tensor and key is understood, or the adapter is refused with a reason."""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions, describe_folder
from lorikeet.adapters.description import AdapterDescription
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.tensors import largest_bits, read_entries
from tests.adapters.builders import LAYERS, geometry, key, lora_tensors, write_adapter, write_config

WEIGHTS = "adapter_model.safetensors"


def check(folder: Path, **options: Any) -> AdapterDescription:
    return describe_folder(folder, DescribeOptions(geometry(), read_weights=True, **options))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        check(folder, **options)
    return str(caught.value)


def test_inspection_describes_a_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, base_model_name_or_path="some/base", lora_alpha=6, use_rslora=True)
    found = describe_folder(tmp_path, DescribeOptions())
    assert found.base_model == "some/base"
    assert [(each.layer, each.module) for each in found.modules] == [(n, m) for n in range(LAYERS) for m in ("q", "v")]
    v = found.modules[3]
    assert (v.a.dtype, v.a.shape, v.b.shape, v.rank, v.scaling) == ("F32", (4, 32), (8, 4), 4, 3.0)
    assert found.parameters == 3 * 4 * (32 + 32 + 32 + 8)
    assert found.weight_bytes == (tmp_path / WEIGHTS).stat().st_size
    assert (found.digest, found.shards, found.warnings) == ("", (), ())


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("infix", [".default", ""])
def test_names_with_and_without_peft_prefix_and_adapter_name_are_understood(
    tmp_path: Path, prefix: str, infix: str
) -> None:
    tensors = {
        name.replace("base_model.model.", prefix, 1).replace(".weight", f"{infix}.weight"): value
        for name, value in lora_tensors().items()
    }
    assert check(write_adapter(tmp_path, tensors)).ranks(geometry()) == {"q": (4,) * LAYERS, "v": (4,) * LAYERS}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora is set, but adapter_model.safetensors has no magnitude"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"peft_type": "TRAINABLE_TOKENS"}, "token_indices is set, but adapter_model.safetensors has no trained"),
        ({"peft_type": "LN_TUNING"}, "it has no weights for the targets of adapter_config.json"),
        ({"peft_type": "POLY"}, "neither served nor converted: it mixes its matrices by a task id"),
        ({"peft_type": "XLORA"}, "neither served nor converted: what it adds depends on the input"),
        ({"peft_type": "PREFIX_TUNING"}, "neither served nor converted: it learns a prompt"),
        ({"peft_type": "NEW"}, "'NEW', which is unknown"),
        ({"peft_type": None}, "peft_type"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "'olora'"),
        ({"init_lora_weights": "loftq"}, "'loftq'"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"alora_invocation_tokens": "x"}, "alora_invocation_tokens"),
        ({"megatron_config": {"x": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "lora_ga"}, "'lora_ga', which changes the base weights"),
        ({"init_lora_weights": "mystery"}, "'mystery', which is unknown"),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "("}, "regular expression"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"kasa_config": {"x": 1}}, "KaSA"),
        ({"use_something_new": True}, "use_something_new"),
        ({"r": 0}, "at least 1"),
        ({"r": 10**400}, "r"),
        ({"rank_pattern": {"q_proj": 10**9}}, "at most"),
        ({"r": "4"}, "$.r"),
        ({"r": True}, "$.r"),
        ({"rank_pattern": {"q_proj": -1}}, "at least 1"),
        ({"rank_pattern": {"q_(": 4}}, "regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"target_modules": "q_("}, "regular expression"),
        ({"target_modules": "x" * 30_000}, "too long"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_unsupported_features_are_refused_with_their_key(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    found = refusal(write_adapter(tmp_path, **config))
    assert reason in found
    assert "adapter_config.json" in found


def test_keys_that_do_not_change_the_result_are_accepted(tmp_path: Path) -> None:
    check(write_adapter(tmp_path, lora_dropout=0.1, megatron_core="megatron.core", use_dora=False, qalora_group_size=16,
                        init_lora_weights="mica", future_key=None, inference_mode=True,
                        fan_in_fan_out=True))  # fmt: skip


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"created_by": "a tool"}, "created_by is ignored"),
        ({"_name_or_path": "/x"}, "_name_or_path is ignored"),
        ({"merge_weights": True}, "merge_weights is ignored"),
        ({"bias": "all"}, "bias is 'all', but adapter_model.safetensors has no biases: those of the base are used"),
        ({"bias": "lora_only"}, "bias is 'lora_only', but"),
        (
            {"target_modules": ["q_proj", "v_proj", "c_attn"]},
            "target_modules names 'c_attn', but the base model has no",
        ),
    ],
)
def test_keys_that_peft_ignores_give_a_warning(tmp_path: Path, config: dict[str, Any], warning: str) -> None:
    plain = check(write_adapter(tmp_path / "plain"))
    found = check(write_adapter(tmp_path / "x", **config))
    (text,) = found.warnings
    assert text.startswith(f"adapter_config.json: {warning}")
    assert (found.modules, found.digest) == (plain.modules, plain.digest)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"peft_type": "LORA", "base_model_name_or_path": "caf\xe9"}', "is not UTF-8: byte 0xe9 at position 53"),
        (b"\xef\xbb\xbf{}", "is UTF-8 with a byte order mark; it must be UTF-8 without"),
        ("{}".encode("utf-16"), "is UTF-16; it must be UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a Git LFS pointer"),
    ],
    ids=["Latin-1", "BOM", "UTF-16", "LFS"],
)
def test_a_config_in_another_encoding_is_refused_by_its_name(tmp_path: Path, content: bytes, reason: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(content)
    assert f"adapter_config.json: {reason}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("alpha", "dtype", "fits"),
    [(8, "float16", True), (1e6, "float16", False), (1e6, "bfloat16", True), (1e38, "bfloat16", False),
     (1e38, "float32", False), (-1e38, "float32", False)],
)  # fmt: skip
def test_weights_that_overflow_the_dtype_of_the_model_are_refused(
    tmp_path: Path, alpha: float, dtype: str, fits: bool
) -> None:
    write_adapter(tmp_path, lora_alpha=alpha)
    if fits:
        check(tmp_path, checks=AdapterChecks(dtype))
    else:
        assert (
            refusal(tmp_path, checks=AdapterChecks(dtype))
            == f"{WEIGHTS}: q of layer 0: too large for {dtype} once scaled"
        )


def test_products_that_overflow_are_refused(tmp_path: Path) -> None:
    tensors = {name: tensor * np.float32(1e30) for name, tensor in lora_tensors().items()}
    check(write_adapter(tmp_path, tensors))
    assert "too large for bfloat16" in refusal(tmp_path, checks=AdapterChecks("bfloat16"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"r": NaN}', "[" * 100_000, '{"a": "' + "x" * 2**20 + '"}'])
def test_a_config_that_is_too_large_or_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refusal(tmp_path)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path) / WEIGHTS
    entries = read_entries(weights)
    os.truncate(weights, weights.stat().st_size - 3)
    with pytest.raises(AdapterError, match="was truncated"):
        largest_bits(weights, entries.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(key(1, "q", "B")), "no matching lora_B"),
        (lambda t: t.pop(key(2, "v", "A")), "no matching lora_A"),
        (lambda t: [t.pop(key(1, "q", side)) for side in "AB"], "model.layers.1.self_attn.q_proj"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[key(0, "q", "A")]}), "lm_head.lora_A"),
        (lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": t[key(0, "q", "A")]}), "q_proj.bias"),
        (lambda t: t.update({"model.layers.01.self_attn.q_proj.lora_A.weight": t[key(0, "q", "A")]}), "layers.01."),
        (
            lambda t: t.update({"model.layers.٣.self_attn.q_proj.lora_A.weight": t[key(0, "q", "A")]}),
            "a module on which LoRA is not supported",
        ),
        (lambda t: t.update({"model.layers.1.self_attn.q_proj.lora_A.weight": t[key(0, "q", "A")]}), "same matrix"),
        (lambda t: t.update({key(1, "q", "A"): np.zeros((4, 31), np.float32)}), "the base model needs [4, 32]"),
        (lambda t: t.update({key(1, "v", "B"): np.zeros((32, 4), np.float32)}), "the base model needs [8, 4]"),
        (lambda t: t.update({key(1, "q", "A"): np.zeros((8, 32), np.float32)}), "rank 8; adapter_config.json says 4"),
        (lambda t: t.update({key(1, "q", "B"): np.zeros((32, 3), np.float32)}), "rank 3; adapter_config.json says 4"),
        (lambda t: t.update({key(1, "q", "A"): np.zeros((4, 32), np.int32)}), "I32"),
        (lambda t: t.update({key(1, "q", "A"): np.zeros((4, 32), np.float64)}), "F64"),
        (lambda t: t.update({key(1, "q", "A"): np.zeros(4, np.float32)}), "expected a matrix"),
        (lambda t: t.update({key(9, "q", s): t[key(1, "q", s)] for s in "AB"}), "only 3 layers"),
        (lambda t: t.update({key(1, "k", s): t[key(1, "v", s)] for s in "AB"}), "does not target"),
        (lambda t: t.clear(), "contains no tensors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_are_refused_by_name(tmp_path: Path, change: Any, reason: str) -> None:
    tensors = lora_tensors()
    change(tensors)
    found = refusal(write_adapter(tmp_path, tensors))
    assert reason in found
    assert WEIGHTS in found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_refused_by_tensor(tmp_path: Path, value: float, dtype: Any) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in lora_tensors().items()}
    tensors[key(2, "v", "B")][-1, -1] = value
    assert key(2, "v", "B") in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize(("bits", "fits"), [(0x7FC0, False), (0xFF80, False), (0x7F7F, True), (0x8000, True)])
def test_bfloat16_is_checked_on_its_bits(tmp_path: Path, bits: int, fits: bool) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.from_numpy(value).bfloat16() for name, value in lora_tensors().items()}
    pattern = bits - 0x10000 if bits >= 0x8000 else bits
    tensors[key(0, "q", "A")].view(torch.int16)[3, 31] = pattern
    write_config(tmp_path)
    save_file(tensors, tmp_path / WEIGHTS)
    if fits:
        check(tmp_path)
    else:
        assert key(0, "q", "A") in refusal(tmp_path)


def test_a_nan_in_the_second_chunk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.adapters.tensors._CHUNK_BYTES", 64)
    tensors = lora_tensors()
    tensors[key(0, "v", "A")][2, 5] = np.nan
    assert key(0, "v", "A") in refusal(write_adapter(tmp_path, tensors))


def test_limits_on_rank_and_size_name_what_exceeds_them(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    assert "rank 4, at most 3 is allowed" in refusal(tmp_path, max_rank=3)
    assert "at most 100 are allowed" in refusal(tmp_path, max_bytes=100)
    assert check(tmp_path, max_rank=4, max_bytes=10**6)


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (zip_bytes(), "a zip archive"),
        (pickle.dumps({"a": list(range(100))}, protocol=2), "a Python pickle"),
        (pickle.dumps({"a": list(range(100))}, protocol=5), "a Python pickle"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a Git LFS pointer, not the file"),
        (b"", "not a complete"),
        (bytes(100), "not a complete"),
        (struct.pack("<Q", 2**60) + b"{}", "not a complete"),
    ],
    ids=["zip", "pickle 2", "pickle 5", "gguf", "LFS", "empty", "zeros", "endless header"],
)
def test_other_formats_in_disguise_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(content)
    found = refusal(tmp_path)
    assert reason in found
    assert WEIGHTS in found


@pytest.mark.parametrize("kept", [4, 100, -1, -1000])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    write_adapter(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:kept])
    assert f"{WEIGHTS}: not a complete safetensors file" in refusal(tmp_path)


def raw_file(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


ENTRY = '"%s":{"dtype":"F32","shape":[1,1],"data_offsets":[%d,%d]}'


@pytest.mark.parametrize(
    "header",
    [
        "{" + ENTRY % ("a", 0, 4) + "," + ENTRY % ("a", 4, 8) + "}",
        "{" + ENTRY % ("a", 0, 4) + "," + ENTRY % ("b", 0, 4) + "}",
        "{" + ENTRY % ("a", 0, 4) + "," + ENTRY % ("b", 2, 6) + "}",
        "{" + ENTRY % ("a", 0, 4) + "," + ENTRY % ("b", 400, 404) + "}",
    ],
    ids=["name twice", "same bytes", "overlap", "outside"],
)
def test_headers_that_list_bytes_or_names_twice_are_refused(tmp_path: Path, header: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(raw_file(header, bytes(8)))
    found = refusal(tmp_path)
    assert "listed twice" in found or "not a complete" in found


def test_pickled_weights_are_named_and_not_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"anything")
    assert "adapter_model.bin is ignored" in refusal(tmp_path)
