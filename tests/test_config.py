"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from lorikeet.config import ConfigError, load_settings
from lorikeet.rows import ROWS, resolve_row


def test_flags_win_over_the_environment_the_file_and_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "lorikeet.toml"
    file.write_text('[server]\nport = 1\nhost = "file"\nlog_level = "debug"\n')
    environment = {"LORIKEET_SERVER__PORT": "2", "LORIKEET_SERVER__HOST": "environment", "OTHER": "x"}
    server = load_settings({"server": {"port": 3, "host": None}}, file, environment).server
    assert (server.port, server.host, server.log_level, server.max_queued) == (3, "environment", "debug", 1024)


def test_lists_in_the_environment_are_separated_by_commas_and_stripped() -> None:
    settings = load_settings(environment={"LORIKEET_SERVER__API_KEYS": "a, b,"})
    assert settings.server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        ({"engine": {"rows": "auto"}}, {}, r"flags: \[engine\]: .*unknown field `rows`"),
        ({"motor": {}}, {}, "flags: no section is called 'motor'"),
        ({"engine": {"max_repeat": 0}}, {}, r"flags: \[engine\]: .*>= 1.*max_repeat"),
        ({"engine": {"block_tokens": 0}}, {}, "block_tokens"),
        ({"server": {"port": 70_000}}, {}, "port"),
        ({}, {"LORIKEET_ENGINE__THREADS": "-1"}, r"environment: \[engine\]: .*threads"),
        ({}, {"LORIKEET_ENGINE__THREADS": "two"}, r"environment: \[engine\]: .*threads"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_source_and_key(
    flags: dict[str, dict[str, object]], environment: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_settings(flags, environment=environment)


@pytest.mark.parametrize("content", [b"[server\n", b'[server]\nhost = "\xff"\n'])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_settings(file=file, environment={})


def test_a_row_is_found_by_name_and_auto_says_which_it_is() -> None:
    name, row = resolve_row("auto")
    assert ROWS[name] == row
    with pytest.raises(ConfigError, match="there are: auto, lorikeet:plain"):
        resolve_row("plain")
