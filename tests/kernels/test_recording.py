"""A recording tells two batches apart by what they compute, and passes every call on."""

import torch

from lorikeet.kernels.base import Batch, LoraSegment, kv_view
from lorikeet.kernels.recording import RecordingKernels
from lorikeet.kernels.reference import ReferenceKernels


def drive(kernels: ReferenceKernels | RecordingKernels, segments: tuple[LoraSegment, ...]) -> list[torch.Tensor]:
    """Call every kernel once on fixed inputs and return what came out."""
    torch.manual_seed(0)
    row = torch.tensor([0])
    batch = Batch(row, row, row, row, row, row[None], row + 1, (), row, segments)
    x, kv = torch.randn(1, 8), kv_view(torch.zeros(1, 32), 1, 2, 1, 8)[0]
    heads = kernels.rotary(x[:, None], torch.ones(1, 8), torch.zeros(1, 8))
    kernels.store_kv(heads, heads, kv, batch)
    mixed = kernels.attention(heads, kv, batch, 1.0, None)
    out = kernels.linear(kernels.rms_norm(mixed, torch.ones(8), 1e-5), torch.eye(8), torch.ones(8))
    if batch.lora:
        kernels.add_lora(out, x, batch.lora, 0, "q", 0)
    return [kv, out, kernels.silu_mul(out)]


def test_recorded_kernels_compute_what_the_wrapped_ones_do() -> None:
    segments = (LoraSegment(0, 1, {(0, "q"): ((torch.ones(2, 8), torch.ones(2, 8)),)}),)
    for found, expected in zip(
        drive(RecordingKernels(ReferenceKernels()), segments), drive(ReferenceKernels(), segments), strict=True
    ):
        assert torch.equal(found, expected)


def test_equal_work_leaves_equal_records_and_an_adapter_shows() -> None:
    records = []
    for segments in ((), (), (LoraSegment(0, 1, {}),)):
        kernels = RecordingKernels(ReferenceKernels())
        drive(kernels, segments)
        records.append(kernels.calls)
    assert records[0] == records[1]
    assert [call for call in records[2] if call not in records[0]] == [
        ("add_lora", (1, 8), (1, 8), ((0, 1),), 0, "q", 0)
    ]
    assert [call[0] for call in records[0]] == ["rotary", "store_kv", "attention", "rms_norm", "linear", "silu_mul"]
