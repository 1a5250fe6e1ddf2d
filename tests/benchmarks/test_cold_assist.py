"""Whether the default preset assists cold prefills, modelled as ``benchmarks/cold_assist.py`` does."""

from benchmarks.cold_assist import MODULES, PRESETS, PROFILE, modelled_ttft_s
from lorikeet.costs.catalog import load_profile


def test_a_cold_request_that_is_alone_is_assisted() -> None:
    """It is none of those whom its assistance delays; when it counted, it waited for its adapter: 1.9 times."""
    profile = load_profile(PROFILE)
    ttft_s = {name: modelled_ttft_s(profile, preset, MODULES["q, k, v"], 256, 8) for name, preset in PRESETS.items()}
    assert ttft_s["assist"] <= 1.25 * ttft_s["all cached"]
    assert ttft_s["wait"] > 1.5 * ttft_s["all cached"]
