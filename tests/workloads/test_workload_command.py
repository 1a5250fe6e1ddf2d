import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet.cli.app import app
from lorikeet.workloads.workload import WorkloadRequest, read_workload
from lorikeet.workloads.workload_summary import summarise_workload

DATA = Path(__file__).parent / "data"
AZURE = str(DATA / "azure_conv_2023_excerpt.csv")
MOONCAKE = str(DATA / "mooncake_conversation_excerpt.jsonl")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "w.jsonl"


def run(file: Path, *flags: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["workload", str(file), *flags])


def test_a_workload_is_written_and_its_figures_printed(file: Path) -> None:
    flags = "--count 200 --rate 2 --adapters 10 --adapter-choice rank-power:1 --prompt-tokens 8-16".split()
    result = run(file, *flags, "--output-tokens", "4", "--seed", "3")
    assert result.exit_code == 0, result.output
    requests = read_workload(file)
    assert len(requests) == 200
    assert {each.adapter for each in requests} <= {f"adapter-{number:04d}" for number in range(10)}
    assert re.search(r"answer tokens +│ +800", result.output)
    assert "10 of 10" in result.output
    assert re.search(r"adapter-000[05] │ +8 │", result.output)
    first = file.read_bytes()
    run(file, *flags, "--output-tokens", "4", "--seed", "3")
    assert file.read_bytes() == first


def test_conversations_come_from_a_trace_and_the_length_of_their_blocks_is_told(file: Path) -> None:
    result = run(file, "--from", MOONCAKE, "--shape", "chat", "--length-scale", "0.0625", "--adapters", "x,y")
    assert result.exit_code == 0, result.output
    assert "prefix blocks of this file have 32 tokens" in result.output
    assert "conversations" in result.output
    assert {each.adapter for each in read_workload(file)} <= {"x", "y"}


def test_a_trace_without_adapters_stays_on_the_base(file: Path) -> None:
    assert run(file, "--from", AZURE, "--rate", "10").exit_code == 0
    requests = read_workload(file)
    assert {each.adapter for each in requests} == {None}
    assert len(requests) / requests[-1].arrival_s == pytest.approx(10, rel=0.2)


def test_calls_of_functions_come_from_a_file_in_its_public_form(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "invocations_per_function_md.anon.d01.csv"
    trace.write_text("HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,9,3\no,a,g,http,1,2\n")
    flags = ["--arrivals", "functions", "--function-trace", str(trace), "--adapters", "2"]
    assert run(file, *flags).exit_code == 0
    assert [each.adapter for each in read_workload(file)].count("adapter-0000") == 12
    assert run(file, *flags, "--minutes", "2-2").exit_code == 0
    assert len(read_workload(file)) == 5
    assert run(file, *flags, "--shape", "translation", "--minutes", "2-2").exit_code == 0
    assert all(each.prefix_blocks for each in read_workload(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape round", "--shape 'round' must be one of plain, chat, translation, agent"),
        ("--arrivals often", "--arrivals 'often' must be one of poisson, gamma, uniform, now, functions"),
        ("--rate fast", "--rate: rate 'fast' is neither"),
        ("--arrivals now --rate 3", "--arrivals now has no --rate, not '3'"),
        ("--cv 0", "--cv 0 is not positive"),
        ("--duration-s -1", "--duration-s -1 is not positive"),
        ("--duration-s 0.001 --arrivals uniform", "no request is left"),
        ("--ranks 7-x --adapters 2", "--ranks: '7-x' is not a rank"),
        ("--prompt-tokens x", "--prompt-tokens: 'x' is neither"),
        ("--minutes 0-9 --arrivals functions --adapters 2", "--minutes '0-9' counts from 1"),
        ("--adapters 2 --adapter-choice favourite", "adapter choice 'favourite' must be one of uniform"),
        ("--adapters 2 --adapter-choice distinct", "1000 requests cannot have distinct adapters"),
        ("--shape chat", "needs a trace"),
        ("--most-tokens 512", "--most-tokens: needs a trace"),
        ("--length-scale 0.5", "--length-scale: needs a trace"),
        (f"--from {MOONCAKE} --arrivals gamma", "--arrivals: has no effect on a trace"),
        (f"--from {MOONCAKE} --prompt-tokens 128", "--prompt-tokens: has no effect on a trace"),
        ("--shape translation --output-tokens 9", "--output-tokens: has no effect on the shape translation"),
        (f"--function-trace {AZURE}", "--function-trace goes with --arrivals functions"),
        (f"--function-trace {AZURE} --arrivals functions --adapters 2", "line 1: expected the columns HashOwner"),
        (f"--from {MOONCAKE} --length-scale 0.1", "a length scale of 0.1 makes 51.2 of 512 tokens"),
        (f"--from {MOONCAKE} --shape chat --length-scale 0.1", "a length scale of 0.1 makes 51.2 of 512 tokens"),
    ],
)
def test_a_flag_without_a_meaning_is_named_with_its_value(file: Path, flags: str, message: str) -> None:
    result = run(file, *flags.split())
    assert result.exit_code == 2
    assert message in result.output
    assert not file.exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "no" / "w.jsonl")
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_a_block_is_known_only_behind_known_ones_of_the_same_adapter() -> None:
    requests = [
        WorkloadRequest(0.0, "a", 10, 2, (1, 2)),
        WorkloadRequest(1.0, "a", 10, 2, (1, 2, 3)),
        WorkloadRequest(3.0, "b", 10, 4, (1,)),
        WorkloadRequest(4.0, "a", 30, 4, (9, 2)),
    ]
    summary = summarise_workload(requests)
    assert summary.known_share == 2 / 8
    assert (summary.requests, summary.span_s, summary.rate) == (4, 4.0, 0.75)
    assert summary.shares == [("a", 0.75), ("b", 0.25)]
    assert (summary.input_tokens.total, summary.output_tokens.most) == (60, 4)


def test_a_single_request_has_neither_rate_nor_variation() -> None:
    summary = summarise_workload([WorkloadRequest(5.0, None, 1, 1)])
    assert (summary.rate, summary.variation, summary.known_share) == (None, None, None)
