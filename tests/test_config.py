"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from lorikeet.config import ConfigError, load_settings
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import ProfileError
from lorikeet.presets import PRESETS, describe_preset, for_one_replica, resolve_preset


def test_flags_win_over_the_environment_the_file_and_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "lorikeet.toml"
    file.write_text('[server]\nport = 1\nhost = "file"\nlog_level = "debug"\n')
    environment = {"LORIKEET_SERVER__PORT": "2", "LORIKEET_SERVER__HOST": "environment", "OTHER": "x"}
    server = load_settings({"server": {"port": 3, "host": None}}, file, environment).server
    assert (server.port, server.host, server.log_level, server.max_queued) == (3, "environment", "debug", 1024)


def test_lists_in_the_environment_are_separated_by_commas_and_stripped() -> None:
    settings = load_settings(environment={"LORIKEET_SERVER__API_KEYS": "a, b,"})
    assert settings.server.api_keys == ("a", "b")
    assert load_settings(environment={"LORIKEET_ADAPTERS__ALLOWED_SOURCES": ""}).adapters.allowed_sources == ()


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        ({"engine": {"rows": "auto"}}, {}, r"flags: \[engine\]: .*unknown field `rows`"),
        ({"motor": {}}, {}, "flags: unknown section 'motor'"),
        ({"engine": {"num_scheduler_steps": 0}}, {}, r"flags: \[engine\]: .*>= 1.*num_scheduler_steps"),
        ({"engine": {"block_size": 0}}, {}, "block_size"),
        ({"server": {"port": 70_000}}, {}, "port"),
        ({}, {"LORIKEET_ENGINE__THREADS": "-1"}, r"environment: LORIKEET_ENGINE__THREADS: Expected `int` >= 0$"),
        ({}, {"LORIKEET_ENGINE__THREADS": "two"}, r"environment: LORIKEET_ENGINE__THREADS: Expected `int`, got `str`$"),
        (
            {},
            {"LORIKEET_ENGINE__THREAD": "2"},
            "LORIKEET_ENGINE__THREAD: unknown setting 'thread'; did you mean threads",
        ),
        ({}, {"LORIKEET_ENGIN__THREADS": "2"}, "LORIKEET_ENGIN__THREADS: unknown section 'engin'; did you mean engine"),
        ({"server": {"root_path": "llm"}}, {}, "root_path: 'llm' must be a path such as /llm"),
        ({"server": {"api_keys": ["key", ""]}}, {}, "an API key or admin key is empty"),
        ({"server": {"admin_keys": [" "]}}, {}, "an API key or admin key is empty"),
        ({}, {"LORIKEET_SERVER__API_KEYS": ""}, "environment: LORIKEET_SERVER__API_KEYS is set, but contains no key"),
        (
            {},
            {"LORIKEET_SERVER__ADMIN_KEYS": " ,"},
            "environment: LORIKEET_SERVER__ADMIN_KEYS is set, but contains no key",
        ),
        ({}, {"LORIKEET_SERVER_API_KEYS": "a"}, "LORIKEET_SERVER_API_KEYS is not a setting.*LORIKEET_SERVER__API_KEYS"),
        (
            {"adapters": {"enabled": False, "preload": ["a=b"]}},
            {},
            "'a=b' cannot be preloaded, since adapters are disabled",
        ),
        (
            {"adapters": {"preload": ["a=b", "c=d", "a=e"]}},
            {},
            "'a' is preloaded twice: from 'b' and from 'e'",
        ),
        ({"cluster": {"replicas": 0}}, {}, r"flags: \[cluster\]: .*replicas"),
        ({"cluster": {"start": "slurm"}}, {}, r"flags: \[cluster\]: .*'slurm'.*start"),
        ({"cluster": {"replicas": 5, "max_replicas": 4}}, {}, "replicas is 5, which is not between min_replicas"),
        (
            {"cluster": {"min_replicas": 2}},
            {"LORIKEET_CLUSTER__MAX_REPLICAS": "4"},
            "replicas is 1, which is not between",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_source_and_key(
    flags: dict[str, dict[str, object]], environment: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_settings(flags, environment=environment)


def test_what_kubernetes_tells_of_a_service_of_this_name_is_nothing_of_ours() -> None:
    environment = {
        "LORIKEET_PORT": "tcp://10.0.0.1:80",
        "LORIKEET_SERVER_PORT": "tcp://10.0.0.1:80",
        "LORIKEET_SERVER_SERVICE_HOST": "10.0.0.1",
    }
    assert load_settings(environment=environment) == load_settings(environment={})


@pytest.mark.parametrize("content", [b"[server\n", b'[server]\nhost = "\xff"\n'])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_settings(file=file, environment={})


def test_scaling_limits_and_replica_count_may_come_from_different_sources(tmp_path: Path) -> None:
    file = tmp_path / "lorikeet.toml"
    file.write_text("[cluster]\nmin_replicas = 2\n")
    settings = load_settings({"cluster": {"replicas": 3}}, file, {"LORIKEET_CLUSTER__MAX_REPLICAS": "4"})
    assert (settings.cluster.min_replicas, settings.cluster.replicas, settings.cluster.max_replicas) == (2, 3, 4)
    assert load_settings(environment={}).cluster.max_replicas == 0


def test_a_row_is_found_by_name_and_auto_says_which_it_is() -> None:
    name, preset = resolve_preset("auto")
    assert PRESETS[name] == preset
    with pytest.raises(ConfigError, match="choose one of: auto, lorikeet:auto"):
        resolve_preset("plain")


def test_start_log_names_preset_and_what_differs_from_it() -> None:
    assert describe_preset("auto") == "preset auto = lorikeet:auto"
    assert describe_preset("elora") == "preset elora"
    changed = describe_preset("vllm-static, adapter_share=0.35,host_kv=evicted")
    assert changed == "preset vllm-static with adapter_share=0.35 (0.2)"


@pytest.mark.parametrize(
    ("name", "said"),
    [("elroa", "did you mean elora or"), ("vllm", "did you mean vllm-static or"), ("elora,evictoin=lru", "eviction")],
)
def test_close_names_are_suggested(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        resolve_preset(name)
    assert len(str(raised.value)) < 120


def test_close_names_of_profiles_are_suggested() -> None:
    with pytest.raises(ProfileError, match="did you mean a100-80-llama-2-7b"):
        load_profile("a100")


def test_axes_of_a_cluster_can_be_set_behind_the_name() -> None:
    name, preset = resolve_preset("loraserve,placement_period_s=60,pool_prefetch=true,routing=least-loaded")
    assert name.startswith("loraserve,placement_period_s")
    assert (preset.placement, preset.placement_period_s, preset.pool_prefetch, preset.routing) == (
        "loraserve",
        60.0,
        True,
        "least-loaded",
    )
    for wrong in ("placement_period_s=0", "comigration=perhaps"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            resolve_preset(f"loraserve,{wrong}")


@pytest.mark.parametrize(
    "names",
    [
        [name for name in PRESETS if name.partition(":")[0] == "loraserve"],
        ["toppings", "toppings:dlora", "toppings:first-fit", "toppings:random"],
        ["dlora", "dlora:proactive", "dlora:rr"],
        [f"lorikeet:{name}" for name in ("kv-affinity", "adapter-affinity", "least-loaded", "round-robin", "random")],
    ],
)
def test_what_is_compared_on_a_cluster_has_the_same_replicas(names: list[str]) -> None:
    assert len(names) > 2
    assert len({PRESETS[name] for name in names}) == len(names)
    assert len({for_one_replica(PRESETS[name]) for name in names}) == 1


def test_an_endpoint_of_traces_is_a_url() -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*'localhost:4317' is not a URL"):
        load_settings(flags={"server": {"otlp_traces_endpoint": "localhost:4317"}}, environment={})
