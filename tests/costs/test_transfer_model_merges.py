"""What a switch of the merged adapter costs, added up by hand."""

import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import Constant, ProfileError, Switching
from lorikeet.costs.transfer_model import MergeModel, TransferModel
from lorikeet.presets import MergeBy
from tests.support.profiles import round_profile

SWITCHING = Switching(merge=Constant(0.010, "s"), merge_rank=Constant(0.001, "s/rank"), restore=Constant(0.004, "s"))


def ref(name: str, **ranks: tuple[int, int]) -> AdapterRef:
    return AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", dict(ranks), 0)


WHOLE, OTHER = ref("whole", q=(4, 4)), ref("other", q=(8, 8))
HALF, TWO = ref("half", q=(2, 0)), ref("two", q=(4, 4), k=(4, 4))
OUT = ref("out", o=(4, 4))


def model(by: MergeBy = MergeBy.DELTA, **changes: object) -> MergeModel:
    profile = round_profile(**{"switching": SWITCHING, **changes})
    return MergeModel(profile, by, TransferModel(profile, profile.geometry.block_bytes(16)))


@pytest.mark.parametrize(
    ("old", "new", "expected_s"),
    [
        (None, WHOLE, 0.010 + 4 * 0.001),
        (WHOLE, None, 0.004),
        (WHOLE, OTHER, 0.010 + 8 * 0.001),  # one pass writes the same weights anew
        (None, HALF, 0.005 + 1 * 0.001),
        (WHOLE, HALF, 0.005 + 1 * 0.001 + 0.002),  # the other layer is restored
        (None, TWO, 0.010 + 8 * 0.001),  # q, k and v are written as one
        (TWO, WHOLE, 0.010 + 4 * 0.001),
        (None, OUT, 0.010 / 3 + 4 * 0.001),
        (OUT, WHOLE, 0.010 + 4 * 0.001 + 0.004 / 3),
    ],
)
def test_only_the_weights_that_a_switch_touches_cost(
    old: AdapterRef | None, new: AdapterRef | None, expected_s: float
) -> None:
    assert model().switch_s(old, new) == pytest.approx(expected_s)


def test_whole_models_come_over_the_hosts_link() -> None:
    whole = model(MergeBy.MODEL, weight_bytes=512_000)
    assert [whole.switch_s(*pair) for pair in ((None, HALF), (HALF, WHOLE), (WHOLE, None))] == [1.0] * 3


def test_what_the_profile_does_not_know_is_named() -> None:
    with pytest.raises(ProfileError, match="profile round has no weight_bytes"):
        model(MergeBy.MODEL).switch_s(None, WHOLE)
    with pytest.raises(ProfileError, match="profile round has no switching"):
        model(switching=None).switch_s(None, WHOLE)


def test_a_composed_switch_moves_the_adapted_weights_twice() -> None:
    profile = load_profile("a100-80-llama-2-7b")
    switching, share = profile.switching, profile.kernel_efficiency["gemm_bandwidth"].value
    assert switching is not None
    weights = 32 * 4 * 4096**2
    assert switching.restore.value == pytest.approx(2 * 2 * weights / (2039e9 * share))
    assert switching.merge == switching.restore
    flops = 312e12 * profile.kernel_efficiency["gemm_flops"].value
    assert switching.merge_rank.value == pytest.approx(2 * weights / flops)
    # Each of four ranks has a quarter.
    four = load_profile("a100-80x4-llama-2-7b")
    assert four.switching is not None
    ratio = share / four.kernel_efficiency["gemm_bandwidth"].value
    assert four.switching.restore.value == pytest.approx(switching.restore.value / 4 * ratio)
