"""Copying natively, on every instruction set of this machine."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.kernels.library import load_library, supported_instruction_sets
from lorikeet.kernels.native_copy import native_copy

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library can be used here")


@pytest.fixture(params=supported_instruction_sets(), scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library(request.param)


sizes = st.one_of(st.integers(0, 70), st.integers(250, 260), st.integers(500, 5000))


@given(st.lists(st.tuples(sizes, st.integers(64, 128), st.integers(64, 128)), max_size=4), st.integers(0, 2**32))
def test_every_byte_arrives_and_no_other_changes(
    library: ctypes.CDLL, pairs: list[tuple[int, int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = [torch.randint(0, 256, (size + 192,), dtype=torch.uint8, generator=generator) for size, _, _ in pairs]
    sources = [each[start : start + size] for each, (size, start, _) in zip(wide, pairs, strict=True)]
    into = [torch.full((size + 192,), 77, dtype=torch.uint8) for size, _, _ in pairs]
    targets = [each[start : start + size] for each, (size, _, start) in zip(into, pairs, strict=True)]
    native_copy(library, sources, targets)
    for source, target, each in zip(sources, targets, into, strict=True):
        assert torch.equal(source, target)
        target.fill_(77)
        assert (each == 77).all()


@pytest.mark.parametrize(
    "target", [torch.zeros(7), torch.zeros(8, dtype=torch.int32), torch.zeros(16)[::2]], ids=["shape", "dtype", "gaps"]
)
def test_pairs_that_do_not_go_together_are_refused(library: ctypes.CDLL, target: torch.Tensor) -> None:
    good = torch.zeros(8)
    with pytest.raises(RuntimeError, match="copied"):
        native_copy(library, [torch.ones(8), torch.ones(8)], [good, target])
    assert not good.any()
