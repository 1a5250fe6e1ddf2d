"""Profiles in slow motion."""

import msgspec
import pytest

from lorikeet.bench.synthetic import synthetic_adapters
from lorikeet.core.plan import KernelForm, Tier
from lorikeet.core.slo import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import OperatingLoads, decode_profile, encode_profile
from lorikeet.costs.stretch import stretched, stretched_slo
from lorikeet.costs.transfers import TransferModel, Way

PROFILE = load_profile("a100-80-llama-2-7b")


@pytest.mark.parametrize("form", list(KernelForm))
def test_steps_take_so_many_times_as_long(form: KernelForm) -> None:
    work = step_work([SequenceWork(0, 512, True, "a", 64.0), SequenceWork(700, 1, True, "b", 8.0)], form)
    before, after = (CostModel(profile, form).step_s(work) for profile in (PROFILE, stretched(PROFILE, 3.0)))
    assert before > 0
    assert after == pytest.approx(3 * before)


def test_so_do_transfers() -> None:
    (adapter,) = synthetic_adapters(1, [64], PROFILE.geometry)
    before, after = (TransferModel(profile, 2**20) for profile in (PROFILE, stretched(PROFILE, 3.0)))
    assert after.copy_s(Way.IN, 5) == pytest.approx(3 * before.copy_s(Way.IN, 5))
    assert after.source_s(adapter, Tier.DEVICE) == pytest.approx(3 * before.source_s(adapter, Tier.DEVICE))


def test_operating_points_keep_their_meaning() -> None:
    loads = OperatingLoads(KernelForm.PADDED, Slo(ttft_s=10.0), 512, 128, 64, 512, {8: 6000.0, 64: 3000.0})
    (slow,) = stretched(msgspec.structs.replace(PROFILE, operating_points=(loads,)), 2.0).operating_points
    assert slow.slo == Slo(ttft_s=20.0)
    assert slow.tokens_per_s == {8: 3000.0, 64: 1500.0}
    assert (slow.prompt_tokens, slow.output_tokens) == (512, 128)


def test_what_is_no_time_stays() -> None:
    slow = stretched(PROFILE, 2.0)
    assert (slow.geometry, slow.pool_bytes, slow.kernel_efficiency) == (
        PROFILE.geometry,
        PROFILE.pool_bytes,
        PROFILE.kernel_efficiency,
    )


def test_it_says_so_and_can_be_written() -> None:
    slow = stretched(PROFILE, 2.0)
    assert slow.name == "a100-80-llama-2-7b*2"
    assert slow.origin.endswith("all times × 2")
    assert decode_profile(encode_profile(slow), "here") == slow


def test_a_factor_of_one_changes_nothing() -> None:
    assert stretched(PROFILE, 1.0) is PROFILE


def test_a_factor_must_be_positive() -> None:
    with pytest.raises(ValueError, match="stretched by 0"):
        stretched(PROFILE, 0.0)


def test_limits_that_are_not_there_stay_away() -> None:
    assert stretched_slo(Slo(ttft_s=2.0), 1.5) == Slo(ttft_s=3.0)
