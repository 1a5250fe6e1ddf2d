import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.costs.catalog import load_profile, profile_names
from lorikeet.costs.profile import ProfileError, decode_profile, encode_profile, write_profile

runner = CliRunner(env={"COLUMNS": "200"})


def test_the_papers_devices_are_there() -> None:
    names = profile_names()
    assert len(names) == len(set(names))
    wanted = {"a40-llama-2-7b", "a100-80-llama-2-7b", "h100-llama-2-7b", "h100x8-llama-2-70b", "a100-80x4-llama-2-70b"}
    assert wanted <= set(names)
    assert {"a10-llama-2-7b", "a100-40-llama-2-7b", "h800-llama-2-7b"} <= set(names)


def test_scaled_profiles_say_so() -> None:
    assert load_profile("a10-llama-2-7b").origin == "scaled from a40 by data sheets"
    assert "of a40, scaled by rooflines" in load_profile("a10-llama-2-7b").step.tokens.source


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    profile = load_profile("a40-llama-2-7b@toppings")
    write_profile(profile, path)
    assert load_profile(path) == load_profile(str(path)) == profile


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("step", "tokens", "points"), [], "step.tokens: points must have ascending counts, at least one, not []"),
        (("step", "tokens", "points"), [[8, 0.1], [1, 0.2]], "step.tokens: points must have ascending counts"),
        (("step", "sampled_rows", "points"), [[1, -0.1]], "step.sampled_rows: the seconds of a point must be finite"),
        (("step", "loop", "value"), float("nan"), "step.loop: nan is not a number"),
        (
            ("transfers", "host_to_device", "bandwidth", "value"),
            0.0,
            "transfers.host_to_device.bandwidth: must be positive, not 0.0 bytes/s",
        ),
        (("lora", "padded", "fixed", "value"), float("nan"), "lora.padded.fixed: nan is not a number"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(path: tuple[str, ...], value: object, complaint: str) -> None:
    tables = tomllib.loads(encode_profile(load_profile("a40-llama-2-7b")))
    *way, last = path
    table = tables
    for name in way:
        table = table[name]
    assert last in table
    table[last] = value
    with pytest.raises(ProfileError, match=re.escape(f"mine.toml: {complaint}")):
        decode_profile(tomli_w.dumps(tables), "mine.toml")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'b200'.* a40-llama-2-7b"):
        load_profile("b200")


def test_an_unknown_paper_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"'elora'; choose one of chameleon, loraserve, toppings"):
        load_profile("a40-llama-2-7b@elora")


@pytest.mark.slow
def test_the_command_lists_profiles_and_prints_one() -> None:
    listed = runner.invoke(app, ["profiles"])
    assert listed.exit_code == 0, listed.output
    assert all(name in listed.output for name in profile_names())
    shown = runner.invoke(app, ["profiles", "show", "h100x8-llama-2-70b"])
    assert decode_profile(shown.output, "shown") == load_profile("h100x8-llama-2-70b")


def test_the_command_fails_on_an_unknown_name_with_the_known_ones() -> None:
    result = runner.invoke(app, ["profiles", "show", "b200"])
    assert result.exit_code == 1
    assert "a40-llama-2-7b" in result.stderr
