"""A recording run again decides the same, whatever happened; a recording that was changed does not."""

import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import Abort, Submit
from lorikeet.core.plan import StepPlan, Token
from lorikeet.costs.profile import encode_profile
from lorikeet.engine.build import assemble
from lorikeet.engine.driver import ScheduledRequests, drive
from lorikeet.engine.recording import FileRecorder, Planned, PlanRan, Received, Record, Recording, Transferred
from lorikeet.engine.replay import Replay, TimedWork, compare_times, plan_fields, replay, turns
from lorikeet.presets import PRESETS, Preset
from lorikeet.worker.modelled import build_modelled_executor, transfer_model
from tests.support.profiles import round_profile
from tests.support.recorded import RecordedEngine, adapter
from tests.support.scripted import request
from tests.support.step_counts import examples

NAMES = ("a", "b", "c", "bad")
PREFIX = list(range(100, 140))


def reference(name: str) -> AdapterRef:
    """An adapter of one or two blocks."""
    return adapter(name, 1 + len(name) // 2)


class RecordedTraffic(RuleBasedStateMachine):
    """Submits, aborts, moves, drops, pauses and steps in any order, on a pool that is often too small."""

    @initialize(
        preset=st.sampled_from(sorted(PRESETS)),
        blocks=st.integers(17, 40),
        host_blocks=st.sampled_from((0, 3, 40)),
        broken=st.frozensets(st.integers(0, 60), max_size=6),
        repeat=st.integers(1, 6),
        budget=st.integers(3, 20),
        async_scheduling=st.booleans(),
    )
    def start(
        self,
        preset: str,
        blocks: int,
        host_blocks: int,
        broken: frozenset[int],
        repeat: int,
        budget: int,
        async_scheduling: bool,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="lorikeet-test-")
        self.path = Path(self.folder.name) / "run"
        self.made = RecordedEngine(
            self.path,
            blocks,
            host_blocks,
            failing=frozenset({AdapterDigest("digest-bad")}),
            broken_transfers=broken,
            sick=frozenset({RequestId("r3")}),
            async_scheduling=async_scheduling,
            preset=preset,
            num_scheduler_steps=repeat,
            max_num_batched_tokens=budget,
        )
        self.asked: set[RequestId] = set()

    @rule(
        name=st.sampled_from((*NAMES, None)),
        prompt=st.integers(1, 36),
        output=st.integers(1, 16),
        stop=st.integers(0, 999),
        twins=st.integers(1, 2),
    )
    def submit(self, name: str | None, prompt: int, output: int, stop: int, twins: int) -> None:
        ref = None if name is None else reference(name)
        for _ in range(twins):
            new = request(
                f"r{len(self.asked)}",
                [*PREFIX[:prompt], stop % 2],
                self.made.clock.now(),
                ref,
                max_tokens=output,
                seed=stop,
                stop_token_ids=(stop,),
            )
            self.asked.add(new.request_id)
            self.made.engine.submit(new)

    @rule(steps=st.integers(1, 8), pause_s=st.sampled_from((0.0, 0.000_123, 0.07)))
    def step(self, steps: int, pause_s: float) -> None:
        for _ in range(steps):
            self.made.step(pause_s)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.asked:
            self.made.engine.abort(data.draw(st.sampled_from(sorted(self.asked))))

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def register_adapters(self, names: set[str]) -> None:
        self.made.engine.register_adapters(tuple(reference(name) for name in sorted(names)))

    @rule(name=st.sampled_from(NAMES))
    def drop_adapter(self, name: str) -> None:
        self.made.engine.drop_adapter(AdapterDigest(f"digest-{name}"))

    @rule(data=st.data())
    def move_away_and_back(self, data: st.DataObject) -> None:
        self.made.step()
        if live := sorted(self.asked - set(self.made.finished)):
            self.made.engine.submit(self.made.engine.export_request(data.draw(st.sampled_from(live))))

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        self.made.run()
        plans = sum(isinstance(r, Planned) and not r.plan.is_empty for r in Recording(self.path))
        found = replay(Recording(self.path))
        assert found.difference is None, found.difference
        assert found.plans == plans
        self.folder.cleanup()


RecordedTraffic.TestCase.settings = hypothesis_settings(
    max_examples=examples(30), stateful_step_count=40, deadline=None
)
TestRecordedTraffic = pytest.mark.slow(RecordedTraffic.TestCase)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Enough requests under enough adapters for a small pool."""
    made = RecordedEngine(tmp_path / "run", blocks=20)
    for index in range(12):
        ref = adapter(NAMES[index % 3], 2)
        made.engine.submit(request(f"r{index}", PREFIX[: 3 + index], made.clock.now(), ref, max_tokens=12, seed=index))
        made.step()
    made.engine.abort(RequestId("r9"))
    made.run()
    return tmp_path / "run"


def changed(path: Path, change: Callable[[Record], Record | None]) -> Recording:
    """Write a recording again with every record changed, or left out for None."""
    whole = Recording(path)
    recorder = FileRecorder.create(path.with_name("changed"), whole.header)
    for record in whole:
        if (kept := change(record)) is not None:
            recorder.note(kept)
    recorder.close()
    return Recording(recorder.path)


def replay_changed(path: Path, change: Callable[[Record], Record | None]) -> Replay:
    found = replay(changed(path, change))
    assert found.difference is not None
    return found


def test_a_recording_written_again_unchanged_is_still_identical(recording: Path) -> None:
    found = replay(changed(recording, lambda record: record))
    assert found.difference is None
    assert found == replay(Recording(recording))


def test_a_changed_plan_is_found_and_shown(recording: Path) -> None:
    def change(record: Record) -> Record:
        if isinstance(record, Planned) and record.plan.step == 7:
            return msgspec.structs.replace(record, plan=msgspec.structs.replace(record.plan, repeat=99))
        return record

    found = replay_changed(recording, change)
    assert found.plans == 7
    assert found.difference is not None
    assert found.difference.replayed is not None
    differing = [field for field in plan_fields(found.difference.recorded, found.difference.replayed) if field.differs]
    assert [(field.name, field.recorded) for field in differing] == [("repeat", "99")]


def test_a_request_that_is_missing_makes_another_plan(recording: Path) -> None:
    missing = RequestId("r4")
    assert replay_changed(
        recording,
        lambda r: None if isinstance(r, Received) and r.message == _submit_of(recording, missing) else r,
    )


def _submit_of(path: Path, request_id: RequestId) -> Submit:
    messages = [record.message for record in Recording(path) if isinstance(record, Received)]
    return next(m for m in messages if isinstance(m, Submit) and m.request.request_id == request_id)


def test_an_abort_that_is_missing_makes_another_plan(recording: Path) -> None:
    replay_changed(recording, lambda r: None if isinstance(r, Received) and isinstance(r.message, Abort) else r)


def test_a_transfer_that_fails_makes_another_plan(recording: Path) -> None:
    def change(record: Record) -> Record:
        if not isinstance(record, Transferred):
            return record
        broken = tuple(msgspec.structs.replace(done, error="broken") for done in record.transfers)
        return Transferred(record.at_s, broken)

    replay_changed(recording, change)


def test_a_transfer_that_never_ends_makes_another_plan(recording: Path) -> None:
    replay_changed(recording, lambda r: None if isinstance(r, Transferred) else r)


def test_another_output_that_is_not_finite_makes_another_plan(recording: Path) -> None:
    def change(record: Record) -> Record:
        if isinstance(record, PlanRan) and record.result.step == 6:
            tokens = tuple((Token(5),) if tokens else () for tokens in record.result.tokens)
            failed = {RequestId("r0"): "the model's output is not finite"}
            return PlanRan(record.at_s, msgspec.structs.replace(record.result, tokens=tokens, failed=failed))
        return record

    replay_changed(recording, change)


def test_fields_of_plans_are_drilled_down_to_what_differs() -> None:
    one = StepPlan(step=1, drops=(RequestId("a"), RequestId("b")), adapters=(AdapterDigest("x"),))
    other = StepPlan(step=1, drops=(RequestId("a"), RequestId("c")))
    fields = {field.name: field for field in plan_fields(one, other)}
    assert not fields["step"].differs
    assert (fields["drops[1]"].recorded, fields["drops[1]"].replayed) == ("b", "c")
    assert (fields["adapters[0]"].recorded, fields["adapters[0]"].replayed) == ("x", "—")


@pytest.mark.slow
@pytest.mark.parametrize("coalesced", [True, False])
def test_a_simulation_replays_too_and_its_own_profile_has_no_error(tmp_path: Path, coalesced: bool) -> None:
    given = EngineSettings(
        record=str(tmp_path / "run"),
        num_scheduler_steps=1 if coalesced else 8,
        memory_bytes=24 * 512,  # little enough that much goes to the host and comes back
        host_memory_bytes=100 * 512,
    )
    settings = Settings(ModelSettings(max_model_len=200), given)
    clock, profile = VirtualClock(), round_profile()
    executor, sizes = build_modelled_executor(settings, profile, Preset(), clock, coalesced=coalesced)
    engine = assemble(settings, executor, sizes, clock).engine
    requests = [
        request(f"r{i}", [i] * (1 + 7 * i % 40), 0.037 * i, adapter(f"x{i % 5}"), max_tokens=1 + 11 * i % 60)
        for i in range(40)
    ]
    deque(drive(engine, clock, ScheduledRequests(requests), coalesced=coalesced), maxlen=0)
    engine.close()
    recording = Recording(tmp_path / "run")
    assert replay(recording).difference is None
    pairs = compare_times(turns(recording), Preset(), transfer_model(given, profile))
    assert {kind: bool(times) for kind, times in pairs.items()} == dict.fromkeys(TimedWork, True)
    assert all(modelled == pytest.approx(recorded) for times in pairs.values() for recorded, modelled in times)


# --- the command -------------------------------------------------------------------------------------

runner = CliRunner(env={"COLUMNS": "160"})


def test_the_command_says_how_many_plans_are_identical(recording: Path) -> None:
    result = runner.invoke(app, ["replay", str(recording)])
    assert result.exit_code == 0, result.output
    assert f"{replay(Recording(recording)).plans} plans identical" in result.output


def test_the_command_shows_the_first_plan_that_differs(recording: Path) -> None:
    changed(recording, lambda r: None if isinstance(r, Received) and isinstance(r.message, Abort) else r)
    result = runner.invoke(app, ["replay", str(recording.with_name("changed"))])
    assert result.exit_code == 1
    assert "one differs" in result.output
    assert "≠ starts[0].request_id" in result.output


def test_the_command_names_what_is_no_recording(tmp_path: Path) -> None:
    result = runner.invoke(app, ["replay", str(tmp_path / "nothing")])
    assert result.exit_code == 1
    assert "No such file" in result.output


def test_replay_command_compares_recorded_times_with_a_profile(recording: Path, tmp_path: Path) -> None:
    profile = tmp_path / "round.toml"
    profile.write_text(encode_profile(round_profile()))
    result = runner.invoke(app, ["replay", str(recording), "--profile", str(profile)])
    assert result.exit_code == 0, result.output
    rows = {line.split()[1]: line.split() for line in result.output.splitlines() if line.startswith("│")}
    assert rows.keys() == {"decode", "prefill", "mixed", "load"}
    assert rows["decode"][5] == "12.30"  # a step of the script, whatever is in it
    assert rows["load"][5:8:2] == ["57.10", "50.00"]
