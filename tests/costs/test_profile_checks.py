"""A profile is refused for a model or a device that it was not made for."""

from pathlib import Path

import msgspec
import pytest

from lorikeet.core import machine
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import ProfileError
from lorikeet.costs.profile_checks import check_device, check_model

A100, XEON = load_profile("a100-80-llama-2-7b"), "Intel(R) Xeon(R) Platinum 8369B CPU @ 2.90GHz"
MEASURED = msgspec.structs.replace(A100, name="mine", device=f"{XEON}, 2 threads")


def test_a_profile_of_another_model_is_refused_by_both_names() -> None:
    other = load_profile("a100-80x4-llama-2-70b").geometry
    with pytest.raises(ProfileError, match="profile a100-80-llama-2-7b is of Llama-2-7B, and my-model has other sizes"):
        check_model(A100, other, "my-model")
    check_model(A100, msgspec.structs.replace(A100.geometry, dtype_bytes=4), "my-model")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("a100-80-llama-2-7b", "NVIDIA A100-SXM4-80GB"),
        ("a100-80x4-llama-2-70b", "NVIDIA A100-SXM4-80GB"),
        ("h100-llama-2-7b", "NVIDIA H100 80GB HBM3"),
        ("a40-llama-2-7b", "NVIDIA A40"),
        ("a10-llama-2-7b", "NVIDIA A10"),
    ],
)
def test_a_profile_of_a_data_sheet_knows_the_drivers_name(name: str, gpu: str) -> None:
    check_device(load_profile(name), "cuda", XEON, [gpu])


def test_a_measured_profile_applies_to_the_device_that_it_names() -> None:
    check_device(MEASURED, "cpu", XEON, [])
    check_device(msgspec.structs.replace(A100, device="NVIDIA L4"), "cuda", XEON, ["NVIDIA L4"])
    check_device(A100, "cuda", XEON, [])


@pytest.mark.parametrize(
    ("device", "running", "gpus"),
    [
        ("cpu", XEON, []),
        ("cuda", "NVIDIA A100-SXM4-40GB", ["NVIDIA A100-SXM4-40GB"]),
        ("cuda", "NVIDIA A10", ["NVIDIA A10"]),
        ("cuda", "NVIDIA H100 80GB HBM3", ["NVIDIA H100 80GB HBM3"]),
    ],
)
def test_a_profile_of_another_device_is_refused_by_both_names(device: str, running: str, gpus: list[str]) -> None:
    with pytest.raises(ProfileError) as refused:
        check_device(A100, device, XEON, gpus)
    assert f"is of A100 SXM 80 GB, and engines run on {running};" in str(refused.value)


def test_a_profile_of_a_processor_is_none_of_a_gpu_or_of_another_processor() -> None:
    for device, processor, gpus in (("cuda", XEON, ["NVIDIA A40"]), ("cpu", "AMD EPYC 7R32", [])):
        with pytest.raises(ProfileError, match="profile mine is of Intel"):
            check_device(MEASURED, device, processor, gpus)


def test_the_machine_is_known_by_the_systems_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors, gpus = tmp_path / "cpuinfo", tmp_path / "gpus"
    processors.write_text(f"processor\t: 0\nmodel name\t: {XEON}\n")
    (gpus / "0000:0a:00.0").mkdir(parents=True)
    (gpus / "0000:0a:00.0" / "information").write_text("Model: \t\t NVIDIA A40\nIRQ: 1\n")
    monkeypatch.setattr(machine, "_PROCESSORS", processors)
    monkeypatch.setattr(machine, "_GPUS", gpus)
    assert machine.cpu_model() == XEON
    assert machine.gpu_models() == ["NVIDIA A40"]
    monkeypatch.setattr(machine, "_GPUS", tmp_path / "none")
    assert machine.gpu_models() == []
