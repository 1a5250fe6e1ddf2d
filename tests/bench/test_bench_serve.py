"""The command, against a server of a few lines and against Lorikeet itself."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from benchmarks import memory, offline
from lorikeet.cli.app import app
from tests.bench.fake_server import FakeServer, running
from tests.models.checkpoints import make_checkpoint
from tests.support.api_server import TOKENIZER
from tests.support.live import write_adapter
from tests.support.served import serving

SMALL = ("--prompt-tokens", "4-8", "--output-tokens", "3")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


def bench(url: str, *flags: str) -> Result:
    lengths = () if "--workload" in flags else SMALL
    given = ["bench", "serve", "--url", url, "--token-ids", "20-90", *lengths, *flags]
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, given)


def test_a_run_is_printed_and_written_with_every_request(server: FakeServer, tmp_path: Path) -> None:
    flags = "--adapters all --adapter-choice round-robin --requests 7 --rate 200 --slo ttft=60".split()
    result = bench(server.url, *flags, "--api-key", "secret", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    for text in ("TTFT, cold adapter", "TPOT", "ITL", "E2E", "goodput", "fairness", "7 / 7"):
        assert text in result.output
    report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert report["figures"]["slo_attainment"] == 1.0
    assert [each["adapter"] for each in report["figures"]["adapters"]] == ["a", "b"]
    assert len(report["exchanges"]) == 7
    assert report["setup"]["adapters"] == ["a", "b"]
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_a_clients_base_url_and_named_models_are_enough(server: FakeServer) -> None:
    result = bench(f"{server.url}/v1/", "--model", "unlisted", "--adapters", "new", "--requests", "2")
    assert result.exit_code == 0, result.output
    assert [body["model"] for body in server.bodies] == ["unlisted", "new", "new"]


def test_errors_are_printed_with_what_the_server_said(server: FakeServer) -> None:
    result = bench(server.url, "--adapters", "base,busy", "--adapter-choice", "round-robin", "--requests", "4")
    assert result.exit_code == 0
    assert "2 / 4" in result.output
    assert "HTTP 429" in result.output
    assert "come back later" in result.output


def test_a_run_without_any_whole_answer_is_a_failure(server: FakeServer) -> None:
    assert bench(server.url, "--adapters", "busy", "--requests", "2").exit_code == 1


def test_a_search_prints_its_probes(server: FakeServer, tmp_path: Path) -> None:
    flags = "--find-peak --rate 400 --probe-s 0.01 --adapters cut --slo ttft=60".split()
    result = bench(server.url, *flags, "--warmup", "0", "--json", str(tmp_path / "r.json"))
    assert "missed" in result.output
    assert "peak load: none" in result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["peak_rate"] is None
    assert [probe["rate"] for probe in report["probes"]] == [400.0, 200.0, 100.0]


def test_a_search_says_that_its_workload_has_ended_it(server: FakeServer, tmp_path: Path) -> None:
    workload = tmp_path / "w.jsonl"
    line = {"arrival_s": 0.0, "adapter": None, "input_tokens": 4, "output_tokens": 3}
    workload.write_text("".join(json.dumps(line | {"arrival_s": 0.01 * number}) + "\n" for number in range(12)))
    flags = f"--find-peak --rate 60 --probe-s 0.1 --slo ttft=60 --workload {workload}".split()
    result = bench(server.url, *flags)
    assert result.exit_code == 0, result.output
    assert "peak load: above 120 requests/s" in result.output
    assert "holds too few requests for probes of 0.1 s at higher rates" in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--find-peak",
        "--slo itl=1",
        "--arrivals often",
        "--arrivals uniform",
        "--arrivals now --rate 3",
        "--rate 3 --arrivals uniform --burstiness 0.5",
        "--burstiness 0 --rate 3",
        "--rate inf",
        "--length-scale 2",
        "--slo-target 0.5",
        "--probe-s 10",
        "--adapters a,a",
        "--endpoint embeddings",
        "--prompt-tokens many",
        "--rate 0 --find-peak --slo ttft=1",
        "--find-peak --slo ttft=1 --requests 500",
        "--find-peak --slo ttft=1 --concurrency 8",
        "--workload /dev/null",
        "--adapters all --model other",
        "--adapter-as {name}",
        "--json /no/such/folder/r.json",
        "--adapters a,b --adapter-choice distinct --requests 3",
    ],
)
def test_options_without_a_meaning_are_refused(server: FakeServer, flags: str) -> None:
    result = bench(server.url, *flags.split())
    assert result.exit_code == 2, result.output
    assert "error:" in result.output


def test_the_options_that_the_page_on_benchmarks_names_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    bench_commands = typer.main.get_command(app).commands["bench"].commands.values()  # type: ignore[attr-defined]
    commands = [*bench_commands, *map(typer.main.get_command, (memory.app, offline.app))]
    options = {name for each in commands for option in each.params for name in (*option.opts, *option.secondary_opts)}
    commands_shown = r"^    (?:lorikeet bench|python -m benchmarks[.](?:memory|offline)) .*$"
    text = "".join(re.findall(commands_shown + r"|`[^`\n]+`", page, re.M))
    named = set(re.findall(r"--[a-z][a-z-]*", text))
    assert named
    assert named <= options | {"--help", "--all"}  # the last one is pytest's


@pytest.mark.slow
async def test_it_drives_lorikeet(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    make_checkpoint(model, "llama", vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=512)
    TOKENIZER.save(str(model / "tokenizer.json"))
    names = ("red", "blue")
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, model, seed)
    # The default preset prefetches adapters, so that no request finds one cold.
    flags = ["--preset=lorikeet:plain", *(f"--lora-modules={name}={tmp_path / name}" for name in names)]
    async with serving(model, tmp_path / "home", *flags) as real:
        url = str(real.http.base_url)
        load = ("--adapters", "all", "--requests", "12", "--rate", "50", "--json", str(tmp_path / "r.json"))
        result = await asyncio.to_thread(bench, url, *load)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    figures = report["figures"]
    assert (figures["completed"], figures["short_answers"], figures["errors"]) == (12, 0, {})
    assert {each["adapter"] for each in figures["adapters"]} == {"red", "blue"}
    assert figures["cold_ttft_s"]["count"] == 2
    assert report["server"]["adapter loads"] == 2
