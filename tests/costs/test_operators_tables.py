import csv
import math
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.vidur_tables import OPERATORS, condense
from lorikeet.costs.operators import OPERATORS_OF_A_LAYER, all_reduce_medians, operator_medians, operator_rows

# Sums over all rows and operators, in milliseconds, added up from the source's own files by another program.
SOURCE_SUMS_MS = {
    ("a100-80", "llama-2-70b"): 5785.9885,
    ("a100-80", "llama-2-7b"): 1554.8680,
    ("a40", "llama-2-70b"): 11371.1985,
    ("a40", "llama-2-7b"): 3007.4260,
    ("h100", "llama-2-70b"): 2082.4915,
    ("h100", "llama-2-7b"): 576.3550,
}
SOURCE_ALL_REDUCE_SUMS_MS = {
    ("a100", 2): 164.562,
    ("a100", 4): 222.525,
    ("a100", 8): 268.010,
    ("h100", 2): 91.088,
    ("h100", 4): 114.747,
    ("h100", 8): 132.586,
}


@pytest.mark.parametrize(("device", "model"), SOURCE_SUMS_MS)
def test_the_carried_medians_are_all_of_the_sources(device: str, model: str) -> None:
    rows = operator_rows(device, model)
    assert len(rows) == 4 * 261
    carried_ms = math.fsum(second for row in rows for second in row.seconds.values()) * 1e3
    assert carried_ms == pytest.approx(SOURCE_SUMS_MS[device, model], rel=1e-9)


@pytest.mark.parametrize(("gpu", "workers"), SOURCE_ALL_REDUCE_SUMS_MS)
def test_the_carried_collectives_are_all_of_the_sources(gpu: str, workers: int) -> None:
    text = (files("lorikeet.costs") / "data" / f"{gpu}_all_reduce.csv").read_text()
    times_us = [float(row["all_reduce"]) for row in csv.DictReader(text.splitlines()) if row["workers"] == str(workers)]
    assert len(times_us) == 994
    assert math.fsum(times_us) / 1e3 == pytest.approx(SOURCE_ALL_REDUCE_SUMS_MS[gpu, workers], rel=1e-9)


def test_a_row_holds_what_the_source_prints_in_milliseconds() -> None:
    (row,) = (row for row in operator_rows("a100-80", "llama-2-7b") if row[:2] == (1, 1))
    printed_ms = (0.003, 0.005, 0.065, 0.005, 0.025, 0.005, 0.116, 0.007, 0.060, 0.002)
    assert list(row.seconds) == list(OPERATORS)
    assert list(row.seconds.values()) == pytest.approx([time_ms / 1e3 for time_ms in printed_ms])


def test_a_token_count_that_was_measured_twice_is_the_middle_of_both() -> None:
    twice = [row for row in operator_rows("h100", "llama-2-70b") if row[:2] == (2, 2048)]
    assert len(twice) == 2
    medians = operator_medians("h100", "llama-2-70b", 2)
    assert len(medians) == 259
    assert medians[2048]["mlp_up_proj"] == pytest.approx(sum(row.seconds["mlp_up_proj"] for row in twice) / 2)


def test_all_reduce_was_measured_inside_one_node_and_not_on_a40() -> None:
    assert all_reduce_medians("a40", 2) is None
    medians = all_reduce_medians("h100", 8)
    assert medians is not None
    assert medians[2048] == pytest.approx(37e-6)
    assert list(medians) == sorted(medians)


def test_condensing_keeps_every_row_and_digit_in_order(tmp_path: Path) -> None:
    source = tmp_path / "vidur_a40_Llama-2-7b-hf_mlp.csv"
    header = [f"time_stats.{name}.{kind}" for name in OPERATORS for kind in ("mean", "median")]
    header += ["num_tokens", "num_tensor_parallel_workers"]
    times = [cell for number in range(10) for cell in ("9.0", f"0.{number}235")]
    lines = [header, [*times, "16", "2"], [*times, "8", "2"], [*times, "4", "1"], [*times, "8", "2"]]
    source.write_text("\n".join(",".join(line) for line in lines))
    name, condensed = condense(source)
    assert name == "a40_llama-2-7b.csv"
    assert condensed[0] == ",".join(("tensor_parallel", "tokens", *OPERATORS))
    assert [line.split(",")[:2] for line in condensed[1:]] == [["1", "4"], ["2", "8"], ["2", "8"], ["2", "16"]]
    assert condensed[1].split(",")[2:] == [f"{number * 100 + 23.5:g}" for number in range(10)]
    assert set(OPERATORS) == {"emb", *OPERATORS_OF_A_LAYER}


def test_condensing_leaves_out_collectives_between_nodes(tmp_path: Path) -> None:
    source = tmp_path / "vidur_a100_dgx_all_reduce.csv"
    source.write_text(
        "time_stats.all_reduce.median,num_workers,size,devices_per_node\n0.0105,2,2048,2\n0.2,2,2048,1\n0.3,16,2048,8\n"
    )
    assert condense(source) == ("a100_all_reduce.csv", ["workers,bytes,all_reduce", "2,2048,10.5"])


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "attention.csv"
    source.write_text("a\n")
    with pytest.raises(ValueError, match=r"attention\.csv is neither"):
        condense(source)
