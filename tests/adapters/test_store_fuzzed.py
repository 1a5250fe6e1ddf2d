"""Broken adapters are registered, or refused with a reason, quickly and in little memory."""

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.adapters.errors import AdapterError, AdapterStoreError
from lorikeet.adapters.store import AdapterStore
from lorikeet.config import AdapterSettings
from tests.support.fakes import GEOMETRY, HIDDEN, LAYERS, write_adapter
from tests.support.fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KEYS = (
    "r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules",
    "layers_to_transform", "layers_pattern", "peft_type", "bias", "task_type", "base_model_name_or_path", "use_dora",
    "modules_to_save", "init_lora_weights", "created_by", "lora_dropout", "fan_in_fan_out", "auto_mapping", "revision",
)  # fmt: skip
MODULES = tuple(f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(LAYERS) for name in "qkvo")

# --- what may stand in a config ----------------------------------------------------------------------

PATTERNS = st.recursive(
    st.sampled_from(
        ("q_proj", "a", ".", ".*", r"\d", "[ab]", "[^.]*", "^", "$", "(?=q)", "(?<=a)", r"\.", "|", "", "é")
    ),
    lambda inner: st.one_of(
        st.builds("({})".format, inner),
        st.builds(
            "(?:{}){}".format, inner, st.sampled_from(("*", "+", "?", "{2}", "{1000}", "{1,65535}", "*?", "{9}"))
        ),
        st.builds("{}{}".format, inner, inner),
        st.builds("{}|{}".format, inner, inner),
        st.builds("(?P<x>{})(?P=x)".format, inner),
    ),
    max_leaves=8,
)
NAMES = st.one_of(
    st.sampled_from((*MODULES, "q_proj", "v_proj", "all-linear", "lm_head")), PATTERNS, st.text(max_size=9)
)
NUMBERS = st.one_of(
    st.integers(-2, 40), st.sampled_from((2**31, 2**63, 2**64, -(2**63), 10**400)), st.floats(), st.just(1e38)
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
FITTING = {
    "r": NUMBERS,
    "lora_alpha": NUMBERS,
    "target_modules": st.lists(NAMES, max_size=5) | NAMES,
    "exclude_modules": st.lists(NAMES, max_size=5) | NAMES,
    "rank_pattern": st.dictionaries(NAMES, NUMBERS, max_size=5),
    "alpha_pattern": st.dictionaries(NAMES, NUMBERS, max_size=5),
    "layers_to_transform": st.lists(NUMBERS, max_size=3) | NUMBERS,
    "layers_pattern": st.lists(NAMES, max_size=3) | NAMES,
}
"""Values that have at least the right type."""


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    """Return a config with wrong values, or one that is no JSON, or not UTF-8."""
    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        config[key] = draw(FITTING[key] if key in FITTING and draw(st.integers(0, 3)) else VALUES)
    if draw(st.booleans()):
        config[draw(st.text(max_size=9))] = draw(VALUES)
    text = json.dumps(config)
    match draw(st.integers(0, 9)):
        case 0:
            return text.encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig"))))
        case 1:
            return text.encode().replace(b"q_proj", b"q_proj\xe9")
        case 2:
            return mutated(draw, text.encode())
        case 3:
            deep = draw(st.sampled_from((100, 950, 5_000, 100_000)))
            return text[:-1].encode() + b', "auto_mapping": ' + b"[" * deep + b"]" * deep + b"}"
        case 4:
            return text[:-1].encode() + b', "r": 8, "r": 4}'
    return text.encode()


def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes of which some were changed, removed, added or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                data = data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + draw(st.binary(max_size=20)) + data[at:]
            case 3:
                data = data[:at] + data[at : at + 50] * draw(st.integers(2, 50)) + data[at:]
    return data


# --- what may stand in a header ----------------------------------------------------------------------

DTYPES = st.sampled_from(("F32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "", "f32", None, 1))
SIZES = st.one_of(st.integers(-1, 40), st.sampled_from((2**31, 2**63, 2**64, 10**30, 1.5, True, None, "4")))
OFFSETS = st.one_of(st.lists(SIZES, min_size=2, max_size=2), st.lists(SIZES, max_size=3), SIZES)


@st.composite
def headers(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return a weights file whose header was changed."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    data = whole[8 + length :]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(header)))
        match draw(st.integers(0, 6)):
            case 0:
                header[name]["dtype"] = draw(DTYPES)
            case 1:
                header[name]["shape"] = draw(st.lists(SIZES, max_size=4) | SIZES)
            case 2:
                header[name]["data_offsets"] = draw(OFFSETS)
            case 3:
                header[draw(st.text(max_size=20))] = header[name]
            case 4:
                header[name] = draw(VALUES)
                break
            case 5:
                header["__metadata__"] = draw(VALUES)
                break
            case 6:
                count = draw(st.sampled_from((10,) * 8 + (1_000,) * 4 + (50_000,)))
                empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                header |= {f"model.layers.{number}.x": empty for number in range(count)}
    text = json.dumps(header).encode()
    if not draw(st.integers(0, 3)):
        text = mutated(draw, text)
    said = draw(
        st.sampled_from((len(text),) * 6 + (0, 1, max(0, len(text) - 1), len(text) + 1, 2**40, 2**63, 2**64 - 1))
    )
    return struct.pack("<Q", said) + text + data


@st.composite
def weights(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return a weights file with other contents, or which is no such file."""
    length = 8 + int.from_bytes(whole[:8], "little")
    match draw(st.integers(0, 5)):
        case 0:
            magic = draw(
                st.sampled_from((b"PK\x03\x04", b"\x80\x02", b"\x1f\x8b", b"GGUF", b"version https://git-lfs", b""))
            )
            return magic + draw(st.binary(max_size=200))
        case 1:
            return whole[:length] + mutated(draw, whole[length:])
        case 2:
            return mutated(draw, whole)
        case 3:
            odd = draw(
                st.sampled_from((b"\x00\x00\x80\x7f", b"\x00\x00\xc0\xff", b"\xff\xff\x7f\x7f", b"\x01\x00\x00\x00"))
            )
            at = length + 4 * draw(st.integers(0, (len(whole) - length) // 4 - 1))
            return whole[:at] + odd + whole[at + 4 :]
        case 4:
            name = draw(st.sampled_from((b"q_proj", b"self_attn", b"layers.0", b"lora_A", b"weight", b"base_model")))
            other = draw(st.binary(min_size=len(name), max_size=len(name)))
            return whole[:length].replace(name, other, draw(st.integers(1, 3))) + whole[length:]
    return whole + draw(st.binary(max_size=30))


# --- the tests ---------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    settings = AdapterSettings(adapter_dir=str(tmp_path), store_dir=str(tmp_path / "store"))
    return AdapterStore(tmp_path / "store", settings, GEOMETRY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def check(fuzz: Fuzzing, store: AdapterStore, folder: Path, file: str, content: bytes) -> None:
    """Let a file of a folder have this content, and register the folder."""
    (folder / file).write_bytes(content)
    with fuzz.case(file, repr(content[:2_000])):
        try:
            with store.stage(str(folder), trusted=True) as staged:
                assert staged.digest
                fuzz.counts["accepted"] += 1
        except AdapterStoreError:
            raise
        except AdapterError as error:
            fuzz.counts["refused with a page"] += len(str(error)) > 2_000


def test_configs(fuzz: Fuzzing, store: AdapterStore, folder: Path) -> None:
    @fuzz.settings(few=150)
    @given(configs())
    def run(config: bytes) -> None:
        check(fuzz, store, folder, CONFIG, config)

    run()


@pytest.mark.parametrize("kind", [headers, weights], ids=lambda kind: kind.__name__)
def test_weights_files(
    fuzz: Fuzzing, store: AdapterStore, folder: Path, kind: Callable[[bytes], st.SearchStrategy[bytes]]
) -> None:
    assert HIDDEN == 16  # so that the file is small
    whole = (folder / WEIGHTS).read_bytes()

    @fuzz.settings(few=150)
    @given(kind(whole))
    def run(content: bytes) -> None:
        check(fuzz, store, folder, WEIGHTS, content)

    run()


def test_folders(fuzz: Fuzzing, store: AdapterStore, folder: Path, tmp_path: Path) -> None:
    """Files are missing, are folders or links, or have other names."""
    names = st.sampled_from(
        (CONFIG, WEIGHTS, "adapter_model.bin", f"{WEIGHTS}.index.json", "adapter_model-00001-of-00002.safetensors")
    )
    odd = tmp_path / "odd"

    @fuzz.settings(few=60)
    @given(
        st.lists(st.tuples(names, st.sampled_from(("none", "folder", "link", "loop", "empty", "config", "weights"))))
    )
    def run(changes: list[tuple[str, str]]) -> None:
        shutil.rmtree(odd, ignore_errors=True)
        shutil.copytree(folder, odd)
        for name, change in changes:
            place = odd / name
            with suppress(OSError):
                shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
            match change:
                case "folder":
                    place.mkdir()
                case "link":
                    place.symlink_to("/etc/hostname")
                case "loop":
                    place.symlink_to(place.name)
                case "empty":
                    place.touch()
                case "config" | "weights":
                    shutil.copy(folder / (CONFIG if change == "config" else WEIGHTS), place)
        with fuzz.case(repr(changes)), suppress(AdapterError), store.stage(str(odd), trusted=True):
            fuzz.counts["accepted"] += 1

    run()
