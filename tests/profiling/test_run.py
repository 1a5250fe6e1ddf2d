"""From a tiny model to a profile file, and the hand-driven executor below it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.plan import KernelForm, Tier
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import decode_profile, encode_profile, read_profile
from lorikeet.models.config import read_model_config
from lorikeet.profiling.driver import ExecutorDriver, ExecutorDriverError
from lorikeet.profiling.machine_limits import LimitMeter, MachineLimits
from lorikeet.profiling.run import Thoroughness, kernel_efficiency, run_profile
from lorikeet.profiling.steps import (
    Step,
    SweepLimits,
    base_steps,
    decodes,
    lora_steps,
    measure_lora,
    prefills,
    without_adapters,
)
from lorikeet.profiling.transfers import random_adapters
from lorikeet.worker.torch_executor import build_torch_executor

pytestmark = pytest.mark.slow

TINY = Thoroughness(kv_tokens=512, step_rounds=1, lora_rounds=1, transfer_rounds=1, loop_tokens=4, ranks=(2, 4))
LIMITS = MachineLimits(threads=1, read_gb_s=10.0, gemm_gflops={1: 10.0, 8: 50.0, 512: 100.0})
runner = CliRunner(env={"COLUMNS": "200"})


def settings_for(folder: Path) -> Settings:
    engine = EngineSettings(
        memory_bytes=2**23, host_memory_bytes=2**22, threads=1, max_num_seqs=4, max_num_batched_tokens=32
    )
    return Settings(ModelSettings(model=str(folder)), engine)


@pytest.fixture
def rig(model_folder: Path) -> Iterator[ExecutorDriver]:
    executor, config, sizes = build_torch_executor(
        settings_for(model_folder), model_folder, lambda *_: None, lambda: None
    )
    with closing(executor):
        yield ExecutorDriver(executor, sizes, config.vocab_size, kv_tokens=256)


def test_a_tiny_model_gives_a_whole_profile_that_survives_its_file(model_folder: Path) -> None:
    stages = []
    profile = run_profile(
        settings_for(model_folder),
        "tiny",
        "tiny",
        TINY,
        lambda stage, done, total: stages.append(stage),
        lambda: LIMITS,
    )
    assert decode_profile(encode_profile(profile), "here") == profile
    assert list(dict.fromkeys(stages))[-7:] == [
        *("steps", "transfers", "adapters", "merging", "loop", "host workers", "fitting"),
    ]
    assert profile.lora.keys() == set(KernelForm)
    links = profile.transfers
    for link in (links.source_to_device, links.source_to_host, links.host_to_device, links.device_to_host):
        assert link is not None
        assert link.fit is not None
        assert link.seconds(2**20) > 0
    switching = profile.switching
    assert switching is not None
    assert switching.merge.value + 4 * switching.merge_rank.value > 0
    assert switching.restore.value > 0
    assert switching.merge_fit is not None
    assert switching.merge_fit.points == len(TINY.ranks)
    assert profile.host_lora is not None
    assert profile.host_lora.token_rank.value > 0
    assert profile.host_lora.core_tokens >= 1
    assert len(profile.step.tokens.errors) == len(profile.step.tokens.points)
    assert all(figure.error is not None for figure in profile.kernel_efficiency.values())
    assert profile.weight_bytes is not None
    assert profile.step.fit is not None
    assert profile.step.average is not None
    assert profile.kernel_efficiency.keys() <= {"decode", "prefill", "lora"}  # one round may give a part no time at all
    for form in KernelForm:
        with_adapter = step_work([SequenceWork(8, 1, True, "a", 4.0)], form)
        model = CostModel(profile, form)
        assert model.step_s(with_adapter) >= model.step_s(with_adapter._replace(lora=None)) > 0
    assert profile.step.loop.value + profile.step.loop_sequence.value > 0


class ScriptedRig:
    """Runs nothing: a step of so many rows takes so many seconds, and with adapters up to so many more or fewer."""

    def __init__(self, by_rows: Mapping[int, tuple[float, float]]) -> None:
        self.runs: Counter[tuple[Step, KernelForm]] = Counter()
        self._by_rows = by_rows
        self._random = Random(0)

    def prepare(self, step: Step) -> Step:
        return step

    def run(self, step: Step, form: KernelForm | None = None) -> SimpleNamespace:
        seconds, noise = self._by_rows[len(step)]
        if form is None:
            return SimpleNamespace(seconds=seconds)
        self.runs[step, form] += 1
        return SimpleNamespace(seconds=seconds + self._random.uniform(-noise, noise))


def under_ranks(*ranks: float) -> Step:
    return tuple(SequenceWork(8, 1, True, f"a{i}", rank) for i, rank in enumerate(ranks))


def test_steps_with_adapters_are_measured_until_stable_or_out_of_time() -> None:
    quiet, noisy, long = under_ranks(4), under_ranks(4, 8), under_ranks(4, 8, 16)
    rig, ticks = ScriptedRig({1: (1.0, 0.0), 2: (0.1, 0.1), 3: (2.0, 1.9)}), []
    found = measure_lora(cast("ExecutorDriver", rig), [quiet, noisy, long], 40, lambda: ticks.append(1))
    assert {rig.runs[quiet, form] for form in KernelForm} == {8}
    assert {rig.runs[noisy, form] for form in KernelForm} == {40}
    # Two forms beside the base take some 8 s a round, one takes 4 s; no more begin after 90 s.
    assert 8 <= rig.runs[long, KernelForm.UNPADDED] == rig.runs[long, KernelForm.PADDED] < 14
    assert 14 < rig.runs[long, KernelForm.EINSUM] < 40
    for form, points in found.items():
        assert [len(point.with_s) for point in points] == [rig.runs[step, form] for step in (quiet, noisy, long)]
    assert len(ticks) == 3 * 40


def test_ranks_that_are_all_the_same_have_nothing_to_pad() -> None:
    same, mixed = under_ranks(8, 8), under_ranks(8, 16)
    rig = ScriptedRig({2: (1.0, 0.5)})
    found = measure_lora(cast("ExecutorDriver", rig), [same, mixed], 3, lambda: None)
    unpadded, padded = found[KernelForm.UNPADDED], found[KernelForm.PADDED]
    assert unpadded[0].with_s == padded[0].with_s
    assert unpadded[1].with_s != padded[1].with_s
    assert rig.runs[same, KernelForm.PADDED] == 3


def test_a_part_that_the_fit_gave_no_time_has_no_efficiency(model_folder: Path) -> None:
    profile = load_profile("a100-80-llama-2-7b")
    no_time = structs.replace(profile.step.tokens, points=((1, 0.0), (512, 1.0)))
    no_rows = structs.replace(profile.step.sampled_rows, points=((1, 0.0),))
    step = structs.replace(profile.step, tokens=no_time, sampled_rows=no_rows)
    noisy, config = structs.replace(profile, step=step), read_model_config(model_folder)
    assert kernel_efficiency(profile, config, [LIMITS]).keys() == {"decode", "prefill", "lora"}
    assert kernel_efficiency(noisy, config, [LIMITS]).keys() == {"prefill", "lora"}


def test_the_command_writes_the_file_and_prints_every_constant(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.profiling.run.QUICK", TINY)
    monkeypatch.setattr(LimitMeter, "__init__", lambda self, dtype, device: None)
    monkeypatch.setattr(LimitMeter, "measure", lambda self: LIMITS)
    # All that is taken is touched: what a machine has, else, and the host tier of a real model.
    monkeypatch.setattr("lorikeet.cli.profile.EngineSettings", partial(EngineSettings, memory_bytes=2**23))
    monkeypatch.setattr("lorikeet.cli.profile.HOST_MEMORY_BYTES", 2**22)
    path = tmp_path / "mine.toml"
    arguments = ["profile", "--quick", "--model", str(model_folder), "--output", str(path), "--threads", "1"]
    result = runner.invoke(app, [*arguments, "--max-num-seqs", "4", "--max-num-batched-tokens", "32"])
    assert result.exit_code == 0, result.output
    profile = read_profile(path)
    assert profile.name == "mine"
    assert profile.model == model_folder.name
    links = [f"transfers.{link}.bandwidth" for link in ("source_to_device", "source_to_host", "device_to_host")]
    for name in ("step.decode_attention", "lora.unpadded.adapter_rank", "switching.merge_rank", *links):
        assert name in result.stdout
    assert "lora.einsum.prefill_fit" in result.stdout


def test_a_folder_that_is_not_there_ends_the_command_before_anything_runs(tmp_path: Path) -> None:
    result = runner.invoke(app, ["profile", "--output", str(tmp_path / "none" / "p.toml")])
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_a_prepared_step_runs_as_often_as_one_likes(rig: ExecutorDriver) -> None:
    step = rig.prepare(decodes(2, 20))
    assert [rig.run(step, repeat=4).steps for _ in range(3)] == [4, 4, 4]
    mixed = rig.prepare(decodes(1, 20) + prefills(1, 16))
    assert [rig.run(mixed).steps for _ in range(3)] == [1, 1, 1]


def test_after_clearing_another_can_drive_the_executor(rig: ExecutorDriver) -> None:
    with random_adapters(rig.sizes.geometry, (2, 4)) as adapters:
        ref = adapters.refs[4][0]
        rig.write_kv(ref)
        rig.load(ref)
    step = rig.prepare([SequenceWork(8, 1, True, ref.digest, 4)])
    rig.run(step)
    rig.clear()
    assert rig.run(rig.prepare(decodes(1, 8))).steps == 1


def test_blocks_go_to_the_host_and_back_and_adapters_there(rig: ExecutorDriver) -> None:
    rig.write_host()
    with random_adapters(rig.sizes.geometry, (2,)) as adapters:
        times = [rig.copy(Tier.HOST, 8), rig.copy(Tier.DEVICE, 8), rig.read_to_host(adapters.refs[2][0])]
    assert min(times) > 0


def test_too_few_blocks_for_a_copy_are_named(rig: ExecutorDriver) -> None:
    with pytest.raises(ExecutorDriverError, match="17 blocks are more than the 16 of the largest copy"):
        rig.copy(Tier.HOST, 17)


def test_too_little_memory_is_named(rig: ExecutorDriver) -> None:
    with pytest.raises(ExecutorDriverError, match="does not fit into 256 tokens"):
        rig.prepare(decodes(4, 100))


def test_every_step_of_a_sweep_keeps_to_the_limits() -> None:
    limits = SweepLimits(sequences=8, step_tokens=64, sequence_tokens=256, kv_tokens=1024)
    adapters = {2: ["a", "b"], 4: ["c"], 8: ["d"]}
    steps = [*base_steps(limits), *lora_steps(adapters, limits)]
    assert all(limits.allows(step) for step in steps)
    assert len(steps) == len(set(steps))
    assert any(sequence.adapter for step in steps for sequence in step)
    assert not any(sequence.adapter for step in steps for sequence in without_adapters(step))
