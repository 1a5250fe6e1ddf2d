"""A recording of kernels distinguishes batches by their calls, and passes every call on."""

import torch

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.interface import Batch, RotaryPairs, Rotation, kv_view
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraPieces, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.reference import ReferenceKernels
from tests.support.recording_kernels import RecordingKernels


def one_adapter(pieces: LoraPieces) -> LoraBatch:
    """Row 0 runs under an adapter."""
    return LoraBatch([LoraSegment(0, 1, LoraWeights(pieces, layers=1))])


def drive(kernels: ReferenceKernels | RecordingKernels, lora: LoraBatch | None) -> list[torch.Tensor]:
    """Call every kernel once on fixed inputs and return what came out."""
    torch.manual_seed(0)
    row = torch.tensor([0])
    batch = Batch(row, row, row, row, torch.tensor([0, 1]), row + 1, row[None], row, lora)
    x = torch.randn(1, 8)
    kv = kv_view(torch.zeros(1, 32), 1, 2, 1, 8)[0]
    qkv = torch.cat((x, x, x), dim=1)
    kernels.rotary_store(qkv, Rotation(torch.ones(1, 8), torch.zeros(1, 8), RotaryPairs(8)), kv, batch, None)
    mixed = kernels.attention(qkv, kv, batch, 1.0, None)
    delta = None if batch.lora is None else LoraDelta(batch.lora, 0, LoraTargets(LoraTarget("q", 0, 8)))
    normed = kernels.add_norm(mixed, x, torch.ones(8), 1e-5)
    out = kernels.linear(normed, kernels.pack(torch.eye(8)), torch.ones(8), delta)
    return [kv, out, kernels.silu_mul(out)]


def test_recorded_kernels_compute_like_the_wrapped_kernels() -> None:
    lora = one_adapter({(0, "q"): ((torch.ones(2, 8), torch.ones(2, 8)),)})
    for found, expected in zip(
        drive(RecordingKernels(ReferenceKernels()), lora), drive(ReferenceKernels(), lora), strict=True
    ):
        assert torch.equal(found, expected)


def test_equal_work_leaves_equal_records_and_an_adapter_shows() -> None:
    records = []
    for lora in (None, None, one_adapter({})):
        kernels = RecordingKernels(ReferenceKernels())
        drive(kernels, lora)
        records.append(kernels.calls)
    assert records[0] == records[1]
    lora = (((0, 1),), KernelForm.UNPADDED, 0, LoraTarget("q", 0, 8))
    assert [call for call in records[2] if call not in records[0]] == [
        ("linear with lora", (1, 8), (8, 8), (8,), *lora)
    ]
    assert [call[0] for call in records[0]] == ["rotary_store", "attention", "add_norm", "linear", "silu_mul"]
