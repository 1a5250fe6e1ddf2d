from pathlib import Path

import pytest

from lorikeet.workloads.workload import (
    Slo,
    WorkloadError,
    WorkloadRequest,
    read_azure,
    read_mooncake,
    read_workload,
    write_workload,
)

DATA = Path(__file__).parent / "data"


def test_a_workload_survives_writing_and_reading(tmp_path: Path) -> None:
    requests = [
        WorkloadRequest(0.0, None, 12, 3),
        WorkloadRequest(0.25, "formal", 40, 8, (1, 2), "c1", "acme", -1, Slo(ttft_s=0.5)),
    ]
    write_workload(tmp_path / "w.jsonl", requests)
    assert read_workload(tmp_path / "w.jsonl") == requests


def test_fields_that_are_not_set_are_not_written_but_the_four_required_ones_are(tmp_path: Path) -> None:
    write_workload(tmp_path / "w.jsonl", [WorkloadRequest(0.0, None, 12, 3)])
    assert (tmp_path / "w.jsonl").read_text() == (
        '{"arrival_s":0.0,"adapter":null,"input_tokens":12,"output_tokens":3}\n'
    )


def test_fields_of_the_request_log_that_a_workload_does_not_know_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(
        '{"arrival_s": 1, "adapter": "a", "input_tokens": 2, "output_tokens": 3, "request_id": "r", "ttft_s": 0.1}\n'
    )
    assert read_workload(tmp_path / "w.jsonl") == [WorkloadRequest(1.0, "a", 2, 3)]


def test_request_log_arrivals_start_with_the_earliest_arrival(tmp_path: Path) -> None:
    line = '{"arrival_s": %s, "adapter": null, "input_tokens": 2, "output_tokens": 3}\n'
    (tmp_path / "w.jsonl").write_text("".join(line % arrival_s for arrival_s in (0, -1.5, 2, -0.5)))
    assert [request.arrival_s for request in read_workload(tmp_path / "w.jsonl")] == [1.5, 0.0, 3.5, 1.0]


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    good = '{"arrival_s": 1, "adapter": "a", "input_tokens": 2, "output_tokens": 3}\n'
    (tmp_path / "w.jsonl").write_text(good + good.replace("2", '"two"'))
    with pytest.raises(WorkloadError, match=r"w\.jsonl, line 2: .*input_tokens"):
        read_workload(tmp_path / "w.jsonl")


def test_azure_arrivals_count_from_the_first_request() -> None:
    requests = read_azure(DATA / "azure_conv_2023_excerpt.csv")
    assert len(requests) == 8
    assert requests[0] == WorkloadRequest(0.0, None, 374, 44)
    assert requests[1].arrival_s == pytest.approx(4.3145, abs=1e-4)


def test_a_csv_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,in,out\n1,2,3\n")
    with pytest.raises(WorkloadError, match=r"line 2: .*TIMESTAMP"):
        read_azure(tmp_path / "t.csv")


def test_mooncake_times_become_seconds_and_hashes_prefix_blocks() -> None:
    requests = read_mooncake(DATA / "mooncake_conversation_excerpt.jsonl")
    assert len(requests) == 8
    assert (requests[0].input_tokens, requests[0].output_tokens) == (6758, 500)
    assert requests[0].prefix_blocks == tuple(range(14))
    assert requests[0].prefix_blocks[0] == requests[1].prefix_blocks[0]
    assert all(request.arrival_s < 60 for request in requests)
