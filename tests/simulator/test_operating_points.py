"""Operating points: their values, the SLO at them, and the error without one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.config import EngineSettings
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo
from lorikeet.costs.profile import CostProfile, OperatingLoads, read_profile, write_profile
from lorikeet.simulator import operating_points
from lorikeet.simulator.operating_points import (
    OperatingPointError,
    OperatingPointSearch,
    find_operating_loads,
    operating_points_for,
    search_host_bytes,
    with_operating_loads,
)
from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario
from tests.support.profiles import GEOMETRY, round_profile

ENGINE = EngineSettings(preset="lorikeet:plain", num_scheduler_steps=1, max_num_seqs=8, host_memory_bytes=2**20)
TTFT = Slo(ttft_s=0.5)
SMALL = OperatingPointSearch(ranks=(1, 2, 4), adapters=3, requests=80, limits=0.0, precision=0.1)
LENGTHS = (8, 4)


def found(seed: int = 0, **changes: object) -> OperatingLoads:
    arguments = {"profile": round_profile(), "engine": ENGINE, "slo": TTFT, "lengths": LENGTHS, "search": SMALL}
    return find_operating_loads(**{**arguments, **changes}, seed=seed)  # type: ignore[arg-type]


class Shown:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.totals: list[int] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.stages.append(stage)
        if done == total:
            self.totals.append(total)


@pytest.mark.slow
def test_larger_ranks_bear_less_and_the_seed_decides() -> None:
    first, again, other = found(), found(), found(seed=1)
    assert first == again != other
    for loads in (first, other):
        assert list(loads.tokens_per_s) == [1, 2, 4]
        assert loads.tokens_per_s[1] > loads.tokens_per_s[2] > loads.tokens_per_s[4] > 0
    assert (first.kernel_form, first.slo, first.max_num_seqs) == (KernelForm.UNPADDED, TTFT, 8)


@pytest.mark.slow
def test_a_looser_slo_bears_more() -> None:
    assert found(slo=Slo(ttft_s=2.0)).tokens_per_s[4] > found().tokens_per_s[4]


def test_probes_at_higher_rates_are_as_long_as_the_slo_asks_for() -> None:
    shown = Shown()
    found(slo=Slo(ttft_s=2.0), search=OperatingPointSearch((1,), 3, 20, 10.0, 1.0), show=shown)
    assert shown.totals[:3] == [20, 40, 80], "1, 2 and 4 requests/s for 20 s"


@pytest.mark.slow
def test_the_load_keeps_the_slo_and_a_larger_one_does_not(tmp_path: Path) -> None:
    """By a simulation of the same requests."""
    file = tmp_path / "round.toml"
    write_profile(round_profile(), file)
    flags = {"profile": str(file), "preset": ENGINE.preset, "count": SMALL.requests, "adapters": 3, "ranks": "1"}
    lengths = {"prompt_tokens": str(LENGTHS[0]), "output_tokens": str(LENGTHS[1])}
    engine = {"max_num_seqs": ENGINE.max_num_seqs, "host_memory_bytes": ENGINE.host_memory_bytes}
    scenario = make_scenario(None, {**flags, **lengths, "engine": engine, "slo": "ttft=0.5"})
    rate = found().tokens_per_s[1] / sum(LENGTHS)
    kept, missed = (run_scenario(scenario, Shown(), times * rate).figures.slo_attainment for times in (1.0, 1.5))
    assert kept is not None
    assert missed is not None
    assert kept >= operating_points.ATTAINMENT > missed


@pytest.mark.slow
def test_new_operating_points_replace_those_of_the_same_setting() -> None:
    profile = with_operating_loads(round_profile(), loads := found())
    other = found(slo=Slo(ttft_s=1.0))
    assert with_operating_loads(with_operating_loads(profile, other), loads).operating_points == (other, loads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"slo": Slo()}, "need limits"),
        ({"slo": Slo(ttft_s=1e-6)}, "rank 1: even 0.00.* requests/s miss the SLO"),
        (
            {"slo": Slo(ttft_s=1e9), "search": OperatingPointSearch((1,), 1, 5, 1.0, 0.5)},
            "rank 1: requests meet the SLO at any rate",
        ),
        ({"lengths": (900, 200)}, r"900 \+ 200 tokens are too long"),
    ],
)
def test_there_may_be_no_operating_point(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(OperatingPointError, match=complaint):
        found(**changes)  # type: ignore[arg-type]


def test_a_simulation_takes_the_profiles_own_and_else_searches_once() -> None:
    shown = Shown()

    def points(profile: CostProfile, preset: str = "lorikeet:plain", slo: Slo = TTFT) -> list[float]:
        by_rank = operating_points_for(
            profile,
            preset,
            slo,
            LENGTHS,
            7,
            engine=ENGINE,
            search=OperatingPointSearch((1,), 3, 40, 0.0, 0.3),
            show=shown,
        )
        return [by_rank[1]]

    own = OperatingLoads(KernelForm.UNPADDED, TTFT, *LENGTHS, 8, 512, {1: 123.0})
    assert points(round_profile(operating_points=(own,))) == [pytest.approx(123.0)]
    assert not shown.stages
    searched = points(round_profile())
    assert set(shown.stages) == {"operating point of rank 1"}
    shown.stages.clear()
    assert points(round_profile()) == searched
    assert points(round_profile(), "lorikeet:plain,routing=random") == searched, "one replica has no use for routing"
    assert not shown.stages
    points(round_profile(), slo=Slo(ttft_s=0.6))
    assert shown.stages, "another SLO is another search"


def test_the_host_has_room_for_all_adapters_twice() -> None:
    assert search_host_bytes(GEOMETRY, OperatingPointSearch(ranks=(2, 8), adapters=5)) == 2 * 5 * 8 * 2 * (4 * 16) * 2


# --- the command -------------------------------------------------------------------------------------

runner = CliRunner(env={"COLUMNS": "200"})


@pytest.mark.slow
def test_the_command_writes_operating_points_into_the_profiles_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating_points, "BRIEF", SMALL)
    file = tmp_path / "round.toml"
    write_profile(round_profile(), file)
    what = [
        "--slo",
        "ttft=0.5",
        "--ranks",
        "1,2",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "4",
        "--max-num-seqs",
        "8",
    ]
    for preset in ("lorikeet:plain", "lorikeet:fair"):  # of one kernel form, so the later takes the place
        command = ["profile", "--operating-points", "--profile", str(file), "--quick", "--preset", preset]
        result = runner.invoke(app, [*command, *what])
        assert result.exit_code == 0, result.output
    (loads,) = read_profile(file).operating_points
    assert loads.tokens_per_s.keys() == {1, 2}
    assert "lorikeet:fair" in loads.source
    assert "ttft=0.5" in result.stdout
    assert "8 + 4" in result.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--operating-points"], "needs an SLO"),
        (["--profile", "a100-80-llama-2-7b"], "goes with --operating-points"),
        (["--operating-points", "--slo", "soon"], "is not a limit"),
        (["--operating-points", "--slo", "ttft=1", "--ranks", "x"], "is not a rank"),
        (["--operating-points", "--slo", "ttft=1", "--preset", "x"], "unknown preset 'x'"),
        (["--operating-points", "--slo", "ttft=1", "--profile", "nowhere"], "unknown profile 'nowhere'"),
    ],
)
def test_command_refuses_invalid_options_before_the_run(flags: list[str], complaint: str) -> None:
    result = runner.invoke(app, ["profile", *flags])
    assert result.exit_code != 0
    assert complaint in result.stderr
