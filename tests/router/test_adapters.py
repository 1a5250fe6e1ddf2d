"""A router's descriptions of adapters, and its estimates of request sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterError
from lorikeet.cli.router import read_adapter
from lorikeet.cluster.routing.fleet import RequestAverages
from lorikeet.core.ids import RequestId
from lorikeet.router.adapters import describe_adapter
from lorikeet.router.proxied_request import CHAT, COMPLETIONS, PromptLengths, RequestBody, routing_request
from tests.router.conftest import write_files


def question(path: str = COMPLETIONS, **fields: Any) -> RequestBody:
    return RequestBody(path, json.dumps({"model": "m", **fields}).encode())


def test_rank_and_size_come_from_the_files_where_they_can_be_read(tmp_path: Path) -> None:
    adapter = describe_adapter("a", str(write_files(tmp_path / "a")))
    assert (adapter.rank, adapter.size_bytes) == (12, 7)
    assert describe_adapter("a", str(tmp_path / "a"), rank=3).rank == 3


def test_other_content_or_another_name_is_another_version(tmp_path: Path) -> None:
    same, other = write_files(tmp_path / "same"), write_files(tmp_path / "other", content=b"others!")
    first = describe_adapter("a", str(write_files(tmp_path / "a")))
    assert describe_adapter("a", str(same)).digest == first.digest
    assert describe_adapter("a", str(other)).digest != first.digest
    assert describe_adapter("b", str(same)).digest != first.digest


def test_an_adapter_that_cannot_be_read_needs_a_rank() -> None:
    with pytest.raises(AdapterError, match="give its rank"):
        describe_adapter("a", "hf://org/a")
    adapter = read_adapter("a=hf://org/a,rank=16")
    assert (adapter.source, adapter.rank, adapter.size_bytes) == ("hf://org/a", 16, 0)
    assert adapter.digest != read_adapter("a=hf://org/b,rank=16").digest


def test_a_folder_here_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert read_adapter("a=a").source == str(tmp_path / "a")
    assert read_adapter(json.dumps({"name": "a", "path": "a"})) == read_adapter("a=a")


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (write_files(tmp_path / "a") / "adapter_config.json").write_text('{"r": "many"}')
    with pytest.raises(AdapterError, match="adapter 'a'"):
        describe_adapter("a", str(tmp_path / "a"))


def test_token_prompts_are_counted_and_text_prompts_estimated_from_backends() -> None:
    lengths = PromptLengths()
    assert lengths.tokens(question(prompt=[5, 6, 7])) == 3
    assert lengths.tokens(question(prompt=[[5, 6], [7]])) == 3
    assert lengths.tokens(question(prompt="x" * 400)) == 100
    for _ in range(200):
        lengths.learn(question(prompt="x" * 400), 200)
    assert lengths.tokens(question(prompt="x" * 400)) == pytest.approx(200, rel=0.05)
    message = {"role": "user", "content": "x" * 400}
    assert lengths.tokens(question(CHAT, messages=[message])) == pytest.approx(200, rel=0.05)
    lengths.learn(question(prompt=[1]), 10**6)
    assert lengths.tokens(question(prompt="x" * 400)) == pytest.approx(200, rel=0.05)


def test_an_answer_is_expected_to_be_as_long_as_others_unless_its_length_is_set() -> None:
    averages = RequestAverages(output_tokens=50.0)

    def expected(output_tokens: int = 0, **fields: Any) -> int:
        about = question(prompt="x", **fields)
        return routing_request(
            RequestId("r"), about, None, 10, output_tokens, averages, wants_keys=False
        ).expected_tokens

    assert expected(max_tokens=200) == 50
    assert expected(max_tokens=20) == 20
    assert expected(max_tokens=200, ignore_eos=True) == 200
    assert expected(max_tokens=200, ignore_eos=True, output_tokens=150) == 50
    assert expected(max_tokens=200, output_tokens=150) == 1


def test_prompts_that_begin_alike_share_keys_under_the_same_adapter_alone() -> None:
    formal, pirate = describe_adapter("formal", "/f", 8), describe_adapter("pirate", "/p", 8)

    def keys(adapter: Any, path: str = COMPLETIONS, **fields: Any) -> tuple[bytes, ...]:
        return routing_request(
            RequestId("r"), question(path, **fields), adapter, 1, 0, RequestAverages(), wants_keys=True
        ).keys

    start = "once upon a time " * 20
    first, second = keys(formal, prompt=start + "there " * 20), keys(formal, prompt=start + "they " * 20)
    assert first[:5] == second[:5]
    assert first[-1] != second[-1]
    assert keys(pirate, prompt=start)[0] != first[0]
    assert len(keys(None, prompt=list(range(64)))) == 4
    turns = [{"role": "user", "content": start}]
    longer = [*turns, {"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
    assert keys(None, CHAT, messages=turns)[:5] == keys(None, CHAT, messages=longer)[:5]
    assert keys(None, prompt=["not", "tokens"])[:1] == ()
