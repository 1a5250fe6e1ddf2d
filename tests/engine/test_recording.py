"""Recordings as files: what was noted is read back, as far as it was written."""

from pathlib import Path

import pytest

from lorikeet import __version__
from lorikeet.config import ConfigError
from lorikeet.core.events import AdapterArrived, Admitted, Decided, Finished, FinishReason, FirstToken, Queued
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import Abort, DropAdapter, Submit
from lorikeet.core.plan import TransferDone
from lorikeet.engine.recording import (
    FORMAT,
    EventsSent,
    FileRecorder,
    Planned,
    PlanRan,
    Received,
    Record,
    Recording,
    RecordingError,
    RequestExported,
    Transferred,
)
from lorikeet.engine.replay import replay
from tests.support.recorded import RecordedEngine, adapter
from tests.support.scripted import request


def record_two(path: Path) -> RecordedEngine:
    """One request under an adapter, one that is aborted, and the adapter dropped at the end."""
    made = RecordedEngine(path)
    first = request("a", [1, 2, 3, 4, 5, 6], made.clock.now(), adapter("x"))
    made.engine.submit(first)
    made.engine.submit(request("b", [7, 8], made.clock.now(), max_tokens=40))
    for _ in range(4):
        made.step()
    made.engine.abort(RequestId("b"))
    made.engine.drop_adapter(adapter("x").digest)
    made.run()
    return made


def records(path: Path) -> list[Record]:
    return list(Recording(path))


def test_the_header_says_which_engine_it_was(tmp_path: Path) -> None:
    made = record_two(tmp_path / "run")
    header = Recording(tmp_path / "run").header
    assert header.version == __version__
    assert header.engine.preset == "lorikeet:auto"
    assert header.engine.max_num_seqs == 5
    assert header.engine.record == ""
    assert header.sizes.total_blocks == 64
    assert f"recording to {tmp_path / 'run'}" in made.notes


def test_messages_plans_results_transfers_and_events_are_all_there(tmp_path: Path) -> None:
    record_two(tmp_path / "run")
    found = records(tmp_path / "run")
    messages = [record.message for record in found if isinstance(record, Received)]
    assert [type(message) for message in messages] == [Submit, Submit, Abort, DropAdapter]
    ended = [done for record in found if isinstance(record, Transferred) for done in record.transfers]
    plans = [record.plan for record in found if isinstance(record, Planned)]
    assert ended == [TransferDone(plans[0].transfers[0].transfer_id, None, 0.0571)]
    results = [record.result for record in found if isinstance(record, PlanRan)]
    assert [plan.step for plan in plans if not plan.is_empty] == [result.step for result in results]
    assert results[0].duration_s == pytest.approx(0.0123)
    events = [event for record in found if isinstance(record, EventsSent) for event in record.events]
    of_a = [type(event) for event in events if event.request_id == "a"]
    assert of_a[0] is Queued
    assert of_a[-5:] == [Admitted, Decided, AdapterArrived, FirstToken, Finished]


@pytest.mark.slow
def test_truncated_recording_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    record_two(tmp_path / "run")
    whole, content = records(tmp_path / "run"), (tmp_path / "run").read_bytes()
    cut, lengths = tmp_path / "cut", set()
    # Every size of the first few hundred and of the last; between, a step that meets every place within a record.
    sizes = [*range(300), *range(300, len(content) - 300, 7), *range(max(300, len(content) - 300), len(content))]
    for size in sizes:
        cut.write_bytes(content[:size])
        try:
            found = records(cut)
        except RecordingError:
            assert not lengths, "only within the header"
            continue
        assert found == whole[: len(found)]
        lengths.add(len(found))
    assert lengths == set(range(len(whole)))


def test_truncated_recording_replays_up_to_its_end(tmp_path: Path) -> None:
    record_two(tmp_path / "run")
    content, whole = (tmp_path / "run").read_bytes(), replay(Recording(tmp_path / "run"))
    (tmp_path / "cut").write_bytes(content[: len(content) * 4 // 5])
    part = replay(Recording(tmp_path / "cut"))
    assert part.difference is None
    assert 2 < part.plans < whole.plans


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"lorikeet recording 999\n", "found lorikeet recording 999, expected lorikeet recording 4"),
        (b'{"arrival_s": 0.1}\n', "found no recording, expected lorikeet recording 4"),
        (b"", "found no recording"),
        (FORMAT, "ends within its header"),
        (FORMAT + b"\x01\0\0\0\x90", "its header is of another version of Lorikeet"),
    ],
)
def test_what_is_no_recording_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RecordingError, match=problem):
        Recording(tmp_path / "file")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nothing: No such file"):
        Recording(tmp_path / "nothing")


def test_a_damaged_record_is_named_by_its_place(tmp_path: Path) -> None:
    record_two(tmp_path / "run")
    content = (tmp_path / "run").read_bytes()
    at = content.index(b"Planned")
    (tmp_path / "run").write_bytes(content[:at] + b"Plunned" + content[at + 7 :])
    with pytest.raises(RecordingError, match="invalid record at byte"):
        records(tmp_path / "run")


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    for _ in range(3):
        record_two(tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    assert records(tmp_path / "run") == records(tmp_path / "run.2")


def test_every_record_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    made = RecordedEngine(tmp_path / "run")
    made.engine.submit(request("a", [1, 2]))
    assert [type(record) for record in records(tmp_path / "run")] == [Received]
    made.step()
    assert [type(record) for record in records(tmp_path / "run")] == [Received, Planned, PlanRan, EventsSent]
    made.engine.close()


def test_a_full_disk_ends_the_recording_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        recorder = FileRecorder(full, Path("/dev/full"))
        for _ in range(2):
            recorder.note(Received(0.0, RequestExported(RequestId("a"))))
    assert caplog.text.count("the recording /dev/full ends here") == 1


def test_a_folder_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        RecordedEngine(tmp_path / "missing" / "run")


def test_a_row_that_this_version_does_not_know_is_named(tmp_path: Path) -> None:
    record_two(tmp_path / "run")
    content = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(content.replace(b"lorikeet:auto", b"lorikeet:auta", 1))
    with pytest.raises(ConfigError, match="lorikeet:auta"):
        replay(Recording(tmp_path / "run"))


def test_an_aborted_request_ends_so_in_the_recording(tmp_path: Path) -> None:
    made = record_two(tmp_path / "run")
    assert made.finished[RequestId("b")].reason is FinishReason.ABORT
