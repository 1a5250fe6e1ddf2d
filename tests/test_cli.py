import json
import os
import re
import shlex
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lorikeet.cli import compat, serve_flags
from lorikeet.cli.app import app
from lorikeet.cli.chat import Conversation
from lorikeet.cli.console import fail, parse_size, write_json
from lorikeet.cli.http_client import ServerClient
from lorikeet.cli.presets import about
from lorikeet.cli.serve import build_settings
from lorikeet.cli.serve_flags import name_settings
from lorikeet.config import SECRET_VARIABLES, ConfigError, Settings
from lorikeet.core.text import format_size
from lorikeet.models.config import read_model_config
from lorikeet.presets import PRESETS, resolve_preset
from lorikeet.terminal import show_ready
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.adapters.builders import shard, write_adapter
from tests.models.checkpoints import make_checkpoint
from tests.support.api_server import TEMPLATE, TOKENIZER

runner = CliRunner(env={"COLUMNS": "200"})
NO_FLAGS: dict[str, Any] = {parameter.name: None for parameter in serve_flags.parameters()}


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Settings:
    """Return what ``lorikeet serve`` would run with."""
    seen: list[Settings] = []
    monkeypatch.setattr("lorikeet.cli.serve.launch", lambda settings, name_settings: seen.append(settings))
    monkeypatch.setattr("lorikeet.cli.serve.check_settings", lambda settings: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    translated, _ = compat.translate(arguments)
    result = runner.invoke(app, ["serve", *translated])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_serve_without_flags_runs_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch) == Settings()


def test_flags_of_vllm_reach_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(
        monkeypatch,
        *"org/model --enable-lora --max-lora-rank 64 --served-model-name a b --tensor-parallel-size 2".split(),
        *"--max-model-len 1024 --max-num-seqs 8 --max-num-batched-tokens 256 --dtype half --port 1".split(),
        *"--data-parallel-size 3".split(),
        *"--api-key k1 k2 --lora-modules sql=/a/sql chat=hf://o/r".split(),
    )
    assert settings.model.model == "org/model"
    assert settings.model.served_names == ("a", "b")
    assert (settings.model.max_model_len, settings.model.dtype) == (1024, "float16")
    assert (settings.engine.max_num_seqs, settings.engine.max_num_batched_tokens, settings.engine.tensor_parallel) == (
        8,
        256,
        2,
    )
    assert settings.adapters.enabled
    assert settings.adapters.max_rank == 64
    assert settings.cluster.replicas == 3
    assert settings.adapters.preload == ("sql=/a/sql", "chat=hf://o/r")
    assert (settings.server.port, settings.server.api_keys) == (1, ("k1", "k2"))


def test_names_of_flags_may_have_underscores_and_values_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(
        monkeypatch,
        *"org/my_model --max_model_len 1024 --served_model_name=my_name --max_loras 4 --quantization none".split(),
        *"--lora_modules my_sql=/a/my_sql my_chat=/b --no_enable_prefix_caching".split(),
    )
    assert (settings.model.model, settings.model.max_model_len) == ("org/my_model", 1024)
    assert settings.model.served_names == ("my_name",)
    assert settings.adapters.preload == ("my_sql=/a/my_sql", "my_chat=/b")
    assert settings.engine.preset == "lorikeet:plain-no-reuse"


@pytest.mark.slow
def test_quantization_is_understood_as_vllm_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for written, meant in (("None", "none"), ("AWQ_marlin", "awq_marlin"), ("int8", "int8")):
        settings = settings_of(monkeypatch, "org/model", "--quantization", written)
        assert settings.model.quantization == meant
    assert settings_of(monkeypatch, "a.gguf", "-q", "gguf", "--tokenizer", "org/model").model.tokenizer == "org/model"


def test_an_adapter_can_be_given_as_vllms_json(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"name": "sql", "path": "/a/sql", "base_model_name": "m"})
    assert settings_of(monkeypatch, "--lora-modules", text).adapters.preload == ("sql=/a/sql",)


@pytest.mark.parametrize("text", ["sql", "=x", "sql=", '{"name": "a"}', "{"])
def test_an_adapter_in_another_form_is_an_error(text: str) -> None:
    result = runner.invoke(app, ["serve", "--lora-modules", text])
    assert result.exit_code == 2
    assert "--lora-modules" in result.output


@pytest.mark.slow
def test_origins_are_given_one_by_one_or_as_vllms_json(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--allowed-origins", '["https://a", "http://b:3000"]', "--allowed-origins", "app://c")
    assert settings_of(monkeypatch, *flags).server.allowed_origins == ("https://a", "http://b:3000", "app://c")
    assert settings_of(monkeypatch, "--allowed-origins", '["*"]').server.allowed_origins == ("*",)
    by_environment = settings_of(monkeypatch, LORIKEET_SERVER__ALLOWED_ORIGINS="https://a,https://b")
    assert by_environment.server.allowed_origins == ("https://a", "https://b")


def test_sizes_are_read_with_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch, "--memory", "1.5GiB").engine.memory_bytes == 3 * 2**29
    engine = settings_of(monkeypatch, "--host-memory", "20GB", "--link-gb-per-s", "0.8").engine
    assert (engine.host_memory_bytes, engine.link_bytes_per_s) == (20 * 10**9, 0.8e9)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("4k", 4000), ("4KiB", 4096), ("2 GB", 2 * 10**9), ("1Ti", 2**40), ("7B", 7)],
)
def test_a_size_means_what_its_unit_says(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4x", "-1", "1e9", "4iB"])
def test_a_size_in_another_form_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")])
def test_sizes_are_shown_in_powers_of_1024(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


def test_flags_win_over_the_environment_and_both_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[server]\nport = 1\nhost = "h1"\nlog_level = "debug"\n')
    settings = settings_of(
        monkeypatch,
        *f"--config {tmp_path}/c.toml --port 3".split(),
        LORIKEET_SERVER__PORT="2",
        LORIKEET_SERVER__HOST="h2",
    )
    assert (settings.server.port, settings.server.host, settings.server.log_level) == (3, "h2", "debug")


def test_vllms_key_in_the_environment_counts_only_where_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch, VLLM_API_KEY="v").server.api_keys == ("v",)
    assert settings_of(monkeypatch, "--api-key", "k", VLLM_API_KEY="v").server.api_keys == ("k",)
    with pytest.raises(ConfigError, match="an API key or admin key is empty"):
        build_settings(None, None, None, NO_FLAGS, {"VLLM_API_KEY": ""})


@pytest.mark.slow
def test_switching_prefix_caching_off_chooses_the_row_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch, "--no-enable-prefix-caching").engine.preset == "lorikeet:plain-no-reuse"
    assert settings_of(monkeypatch, "--disable-radix-cache").engine.preset == "lorikeet:plain-no-reuse"
    assert settings_of(monkeypatch, "--enable-prefix-caching").engine.preset == "auto"
    monkeypatch.setenv("LORIKEET_ENGINE__PRESET", "elora")
    assert settings_of(monkeypatch, "--enable-prefix-caching").engine.preset == "elora"
    refused = runner.invoke(app, ["serve", "--no-enable-prefix-caching"], env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert "--preset elora,kv_after_finish=dropped" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "vllm"],
        ["--preset", "vllm-static,adapter_share=2"],
        ["--link-gb-per-s", "fast"],
        ["--link-gb-per-s", "-1"],
        ["--config", "/no/such.toml"],
        ["--adapter-dir", "/no/such/folder"],
        ["--profile", "nosuch"],
        ["--preset", "elora,eviction=lur"],
        ["--kernels", "nativ"],
        ["--kernels", "native", "--device", "cuda"],
        ["--device", "gpu"],
        ["--lora-modules", "x=/no/such/folder"],
        ["--host-memory", "900TiB"],
        ["--memory", "900TiB"],
        ["--api-key", ""],
        ["--api-key", "key", "--admin-key", " "],
        ["--port", "http"],
        ["--allowed-origins", "example.org"],
        ["--allowed-origins", "https://example.org/"],
        ["--allowed-origins", '["https://example.org", 1]'],
        ["--allowed-origins", '{"https://example.org": 1}'],
        ["--allowed-origins", "["],
        ["--frobnicate"],
    ],
)
def test_a_wrong_setting_ends_the_command_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("lorikeet.cli.serve.launch", lambda settings: pytest.fail("it started"))
    assert runner.invoke(app, ["serve", *arguments]).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "10Q"], "Invalid value for '--memory': '10Q' is not a size"),
        (["--config", "/no/such.toml"], "error: /no/such.toml: No such file or directory\n"),
        (["--adapter-dir", "/no/such/folder"], "error: --adapter-dir: there is no folder '/no/such/folder'"),
        (["--preset", "elora,eviction=lur"], "unknown eviction policy 'lur'; did you mean lru?"),
        (["--preset", "elroa"], "did you mean elora or dlora? (`lorikeet presets --all` lists all)"),
        (["--kernels", "nativ"], "error: unknown kernels 'nativ'; did you mean native?"),
        (["--host-memory", "900TiB"], "error: --host-memory: 900.0 TiB is too much: this machine or container has "),
        (["--adapter-dir-mode", "x"], "error: --adapter-dir-mode: 'x' must be one of serve, allow\n"),
        (["--executor", "x"], "error: --executor: 'x' must be one of torch, paced\n"),
        (["--max-head", "10"], "error: --max-head: Expected `int` >= 1024\n"),
        (["--adapter-resolver", "foo"], "'foo' must be a prefix of URLs, such as hf://org/ or s3://bucket/team/"),
        (["--allow-source", "hf://"], "'hf://' must be a prefix of URLs"),
        (["--dtype", "float23"], "error: unknown dtype 'float23'; did you mean float32"),
        (["--load-format", "pt"], "error: unknown --load-format 'pt'; choose one of: auto, dummy"),
        (["--model-impl", "vllm"], "error: unknown --model-impl 'vllm'; choose one of: auto, lorikeet, transformers"),
        (["--root-path", "llm"], "error: --root-path: "),
        (["--chat-template", "/no/such.jinja"], "error: --chat-template: /no/such.jinja: No such file or directory\n"),
        (["--profile", "a100-80-llama-2-70"], "error: unknown profile 'a100-80-llama-2-70'; did you mean"),
    ],
)
def test_a_wrong_setting_is_reported_in_plain_words(arguments: list[str], message: str) -> None:
    assert message in runner.invoke(app, ["serve", *arguments]).output


def test_a_template_that_does_not_compile_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if")
    done = runner.invoke(app, ["serve", "--chat-template", str(tmp_path / "broken.jinja")])
    assert "broken.jinja: the chat template does not compile" in done.output
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("version", "files", "said"),
    [
        ("2.13.0+cpu", (), "device: cuda needs a torch with CUDA, which 2.13.0+cpu lacks"),
        ("2.13.0", ("/no/such/device",), "device: this machine or container has no NVIDIA GPU"),
    ],
)
def test_a_gpu_that_is_not_there_ends_the_command_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, version: str, files: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("lorikeet.cli.serve_checks._torch_version", lambda: version)
    monkeypatch.setattr("lorikeet.cli.serve_checks._GPU_FILES", files)
    done = runner.invoke(app, ["serve", "--device", "cuda"])
    assert said in done.output
    assert done.exit_code == 2


def test_a_pool_that_is_too_small_ends_the_command_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "")
    (folder / "model.safetensors").unlink()
    done = runner.invoke(app, ["serve", str(folder), "--memory", "1KiB", "--port", "0"])
    assert "error: --memory 1.0 KiB is too small for a sequence of" in done.output
    assert "MiB, or lower --max-model-len" in done.output


def test_triton_without_a_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = runner.invoke(app, ["serve", "--kernels", "triton"])
    assert "error: --kernels: triton runs on a GPU" in done.output
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-dtype", "float16"], "error: unknown --lora-dtype 'float16'; choose one of: auto, int8"),
        (["--kv-cache-dtype", "fp8"], "error: unknown --kv-cache-dtype 'fp8'; choose one of: auto, int8"),
        (["--lora-dtype", "int8", "--kernels", "triton"], "error: --lora-dtype: int8 needs the CPU kernels"),
        (["--kv-cache-dtype", "int8", "--kernels", "triton"], "error: --kv-cache-dtype: int8 needs the CPU kernels"),
    ],
)
def test_forms_of_adapters_and_kv_that_cannot_be_had_are_refused(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = runner.invoke(app, ["serve", *flags])
    assert said in done.output
    assert done.exit_code == 2


def test_an_adapter_folder_with_a_similar_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "pirate").mkdir(parents=True)
    for wrong in ("adapters/pirat", "adapter/pirate"):
        shown = runner.invoke(app, ["serve", "--lora-modules", f"x={tmp_path / wrong}"]).output
        assert f"there is no folder '{tmp_path / wrong}'; did you mean {tmp_path}/adapters/pirate?" in shown
    shown = runner.invoke(app, ["serve", "--lora-modules", f"x={tmp_path}/adapters/pirate"]).output
    assert "has no adapter_config.json" in shown


def test_help_at_80_columns_cuts_no_option() -> None:
    shown = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).output
    for flag in serve_flags.FLAGS:
        first, *others = flag.names.replace("/", " ").split()
        assert re.search(rf"│ {first} ", shown), first
        assert all(other in shown for other in others if len(other) < 29), others


def test_every_preset_is_listed_with_a_line_and_that_of_a_variant_stands_for_it() -> None:
    shown = runner.invoke(app, ["presets", "--all"]).output
    for group in PRESETS.groups():
        for name, preset in group.presets.items():
            line = about(name, group)
            assert re.search(rf"│ {name} +│ {re.escape(line)} +│", shown)
            if "," in line and " " not in line:
                assert resolve_preset(line)[1] == preset
    assert json.loads(runner.invoke(app, ["presets", "--json", "-"]).output)["elora"]["eviction"] == "elora"


def test_the_help_of_serve_shows_defaults_and_wraps_at_the_terminal() -> None:
    shown = runner.invoke(app, ["serve", "--help"]).output
    assert re.search(r"--port .*\[default: \(8000\)\]", shown)
    assert re.search(r"--max-adapter-size .*\[default: \(4.0 GiB\)\]", shown)
    assert "or from LORIKEET_SECTION__KEY in the environment." in shown


def test_every_flag_fills_a_setting_that_exists() -> None:
    fields = {f.name: f.type for f in msgspec.structs.fields(Settings)}
    for flag in serve_flags.FLAGS:
        section, key = flag.setting.split(".")
        assert key in {f.name for f in msgspec.structs.fields(fields[section])}, flag.setting


def test_no_flag_is_both_an_option_and_foreign() -> None:
    own = {name for flag in serve_flags.FLAGS for name in flag.names.replace("/", " ").split()}
    assert not own & compat.FOREIGN_FLAGS.keys()


def test_adapters_in_a_list_need_no_model_before_them() -> None:
    kept, _ = compat.translate(["--lora-modules", "a=x", "b=y", "model"])
    assert kept == ["--lora-modules", "a=x", "--lora-modules", "b=y", "model"]


def test_a_flag_without_meaning_here_is_taken_off_with_a_note() -> None:
    kept, notes = compat.translate(["m", "--max-loras", "4", "--max-cpu-loras=9", "--port", "1"])
    assert kept == ["m", "--port", "1"]
    assert [text.split(" ")[0] for text in notes] == ["--max-loras", "--max-cpu-loras"]


def test_nothing_is_said_of_a_flag_that_asks_for_what_happens_anyway() -> None:
    arguments = [
        "--lora-eviction-policy",
        "lru",
        "--scheduling-policy=fcfs",
        "--enable-chunked-prefill",
    ]
    assert compat.translate(arguments) == ([], [])


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("0.5k", 500), ("2M", 2 * 2**20), ("auto", 0), ("-1", 0)],
)
def test_numbers_of_tokens_are_written_as_in_vllm(text: str, number: int) -> None:
    assert serve_flags._count(text) == number


@pytest.mark.parametrize("text", ["8kk", "k", "1.5", "-2", "eight", ""])
def test_other_texts_are_no_numbers_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        serve_flags._count(text)


def test_flags_about_experts_and_classifiers_are_taken_off_with_a_note() -> None:
    arguments = ["--enable-mixed-moe-lora-format", "--enable-moe-shared-loras", "--max-lora-cls-labels", "3", "m"]
    kept, notes = compat.translate(arguments)
    assert kept == ["m"]
    assert len(notes) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--no-enable-chunked-prefill", "always computed in parts"),
        ("--enable-log-requests", "--request-log FILE"),
        ("--no-enable-log-requests", None),
        ("--disable-uvicorn-access-log", "--log-level warning"),
        ("--download-dir /d", "HF_HUB_CACHE"),
        ("--enable-auto-tool-choice", None),
        ("--allow-credentials", "no cookies"),
        ('--allowed-methods ["*"]', None),
        ('--allowed-headers ["X"]', "may use any"),
        ("--enable-prompt-tokens-details --enable-server-load-tracking --enable-request-id-headers", None),
        ("--enable-tokenizer-info-endpoint --enable-cache-report --enable-metrics", None),
        ("--runner generate --task generate --convert none --tokenizer-mode auto", None),
        ("--stream-interval 1 --structured-outputs-config.backend auto", None),
        ("--structured-outputs-config.backend=xgrammar", "llguidance"),
        ("--stream-interval 10", "sent at once"),
        ("--api-server-count 1 --chat-template-content-format auto --response-role assistant --nnodes 1", None),
        ("--enable-multimodal --enable-tower-connector-lora", None),
        ("--enable-sleep-mode --enable-scale-out --trust-request-chat-template", None),
        ('--weight-transfer-config {"backend":"nccl"}', "AsyncGRPOTrainer"),
        ('--structured-outputs-config {"backend":"auto"}', "llguidance"),
        ("--show-hidden-metrics-for-version=0.32", "no metric is hidden"),
        ("-O3", "--kernels"),
        ("-O 2", "--kernels"),
        ("--enable-mixed-chunk", None),
        ("--async-scheduling", "how many steps"),
        ("--attention-backend FLASHINFER", "--kernels"),
        ('--compilation-config {"level":3}', "--kernels"),
        ("--revision main", None),
    ],
)
def test_common_vllm_flags_are_ignored_with_a_note(arguments: str, said: str | None) -> None:
    kept, notes = compat.translate(["m", *arguments.split()])
    assert kept == ["m"]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_vllms_limit_on_images_is_ours() -> None:
    for value in ('{"image": 4, "video": 0}', '{"image": {"count": 4}}'):
        assert compat.translate(["m", "--limit-mm-per-prompt", value]) == (["m", "--max-images", "4"], [])
    assert compat.translate(["m", '--limit-mm-per-prompt={"video": 1}']) == (["m"], [])
    for value in ("4", '{"image": "many"}', "{"):
        with pytest.raises(compat.CompatError, match="--limit-mm-per-prompt"):
            compat.translate(["m", "--limit-mm-per-prompt", value])


def test_generating_without_a_tokenizer_ends_with_one_line(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = runner.invoke(app, ["generate", "x", "--model", str(tmp_path)])
    assert isinstance(result.exception, SystemExit)
    assert "needs a model folder with a tokenizer.json" in result.output


@pytest.mark.parametrize(
    ("command", "run"),
    [
        (["serve"], "lorikeet.cli.serve.launch"),
        (["router", "--backend", "http://127.0.0.1:1"], "lorikeet.router.run.run_router"),
    ],
)
def test_keys_are_not_left_in_the_environment_of_processes_to_come(
    command: list[str], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "sqlite:///secret")
    seen: list[tuple[Any, set[str]]] = []
    monkeypatch.setattr(run, lambda given, *_: seen.append((given, set(SECRET_VARIABLES) & set(os.environ))))
    assert runner.invoke(app, command).exit_code == 0
    ((given, left),) = seen
    assert not left
    assert given.backend_key if command[0] == "router" else given.server.api_keys


def make_model(folder: Path, template: str) -> Path:
    """Write a tiny random model for contexts that no machine has memory for."""
    make_checkpoint(folder, "llama", vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=2**40)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.slow
def test_an_answer_takes_memory_for_itself_not_for_the_models_whole_context(tmp_path: Path) -> None:
    folder = make_model(tmp_path, TEMPLATE)
    result = runner.invoke(app, ["generate", "hello", "--model", str(folder), "--max-tokens", "3"])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_sharded_adapter_answers_as_its_file_would(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", TEMPLATE)
    adapter = write_random_adapter(tmp_path / "adapter", read_model_config(folder).geometry(4), 8)
    command = ["generate", "hello", "--model", str(folder), "--adapter", str(adapter), "--max-tokens", "3"]
    whole = runner.invoke(app, command)
    shard(adapter)
    before = sorted(adapter.iterdir())
    assert runner.invoke(app, command).output == whole.output
    assert sorted(adapter.iterdir()) == before
    assert whole.exit_code == 0


def test_a_prompt_that_the_template_refuses_ends_the_command_with_one_line(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "{{ raise_exception('only questions') }}")
    result = runner.invoke(app, ["generate", "hello", "--model", str(folder)])
    assert isinstance(result.exception, SystemExit)
    assert "only questions" in result.output


def test_a_flag_that_would_change_what_is_served_is_refused() -> None:
    for flag, value, reason in (
        ("--revision", "v2", "the hub's main revision is served"),
        ("--override-generation-config", '{"temperature": 0}', "change the generation_config.json"),
        ("--hf-overrides", '{"vocab_size": 9}', "change the config.json"),
        ("--runner", "pooling", "only models that generate text"),
        ("--middleware", "a.b", "put a proxy in front"),
    ):
        with pytest.raises(compat.CompatError, match=f"{flag}: .*{reason}"):
            compat.translate([flag, value])


def test_a_foreign_flag_without_its_value_is_an_error() -> None:
    with pytest.raises(compat.CompatError, match="--max-loras needs a value"):
        compat.translate(["--max-loras", "--port", "1"])


def test_the_model_is_not_swallowed_by_a_list_before_it() -> None:
    assert compat.translate(["--api-key", "k", "m"]) == (["--api-key", "k", "m"], [])


def test_the_model_may_be_named_as_sglang_does() -> None:
    assert compat.translate(["--model-path", "m", "--lora-paths", "a=b", "c=d"])[0] == [
        "m",
        *("--lora-paths", "a=b", "--lora-paths", "c=d"),
    ]


@pytest.mark.parametrize(
    ("flags", "file", "environment", "named"),
    [
        ({"engine_memory_bytes": 1}, "", {}, "--memory 1 MiB"),
        ({}, "[engine]\nmemory_bytes = 1", {}, "[engine] memory_bytes 1 MiB"),
        ({}, "", {"LORIKEET_ENGINE__MEMORY_BYTES": "1"}, "LORIKEET_ENGINE__MEMORY_BYTES 1 MiB"),
        ({"engine_memory_bytes": 1}, "[engine]\nmemory_bytes = 1", {}, "--memory 1 MiB"),
    ],
)
def test_errors_name_settings_as_the_user_gave_them(
    tmp_path: Path, flags: dict[str, int], file: str, environment: dict[str, str], named: str
) -> None:
    (tmp_path / "lorikeet.toml").write_text(file)
    text = "memory_bytes 1 MiB is too small; raise host_memory_bytes or lower max_model_len"
    shown = name_settings(text, NO_FLAGS | flags, tmp_path / "lorikeet.toml", environment)
    assert shown == f"{named} is too small; raise --host-memory or lower --max-model-len"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tokenizer: is for GGUF files", "--tokenizer: is for GGUF files"),
        ("replicas: 'x' runs in one only", "--replicas: 'x' runs in one only"),
        ("dir: '/x' cannot be used", "--batch-dir: '/x' cannot be used"),
        ("request_log: '/a/request_log/x': No such file", "--request-log: '/a/request_log/x': No such file"),
        ("environment: LORIKEET_SERVER__PORT: not root_path", "environment: LORIKEET_SERVER__PORT: not root_path"),
    ],
)
def test_an_error_that_begins_with_a_setting_begins_with_its_flag(text: str, shown: str) -> None:
    assert name_settings(text, NO_FLAGS, None, {}) == shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "dlora", "--quantization", "int8"], "--quantization: int8 weights cannot be changed, and preset"),
        (["--tensor-parallel-size", "1000"], "--tensor-parallel-size: 1000 ranks need as many cores, and this"),
        (["-pp", "1000"], "--pipeline-parallel-size: 1000 ranks need as many cores, and this machine has"),
        (["--rank-address", "x:1"], "--rank-address: the engine has only one rank; set --tensor-parallel-size or"),
        (["-tp", "2", "--rank-address", "x:1"], "ranks on other machines need a key: set --rank-key-file"),
        (["-tp", "2", "--rank-address", "x", "--rank-key-file", "{file}"], "--rank-address: 'x' is not HOST:PORT"),
        (["-tp", "2", "--rank-address", "x:1", "--rank-key-file", "{file}"], "--rank-key-file: {file}: a key has at"),
        (["--batch-dir", "{file}/batches"], "--batch-dir: '{file}/batches' cannot be used: Not a directory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_looked_for(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.api.run.serve", lambda *_: pytest.fail("the server is started"))
    file = tmp_path / "file"
    file.touch()
    result = runner.invoke(app, ["serve", *(flag.format(file=file) for flag in flags)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert said.format(file=file) in result.output


def test_a_port_beside_a_socket_is_not_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lorikeet.api.run.serve", lambda *_: None)
    result = runner.invoke(app, ["serve", "--uds", str(tmp_path / "socket"), "--port", "1"])
    assert "--port is not used: the server listens on --uds" in result.output
    assert "--host" not in result.output


@pytest.mark.parametrize(("chats", "route"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_command_that_is_printed_at_start_is_one_that_the_model_answers(
    chats: bool, route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_ready("http://127.0.0.1:1", "base", [], needs_key=False, as_json=False, chats=chats)
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["curl", f"http://127.0.0.1:1{route}"]
    assert json.loads(command[-1]).keys() >= {"model", "messages" if chats else "prompt"}


def test_json_goes_to_a_file_or_alone_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_json(None, {"a": 1})
    assert write_json(str(tmp_path / "r.json"), {"a": 1})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == ""
    assert not write_json("-", {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_every_json_option_is_the_same() -> None:
    def options(command: Any) -> Iterator[Any]:
        yield from (option for option in command.params if "--json" in option.opts)
        for each in getattr(command, "commands", {}).values():
            yield from options(each)

    found = list(options(typer.main.get_command(app)))
    assert len(found) >= 8
    assert {(option.name, option.metavar) for option in found} == {("json_file", "FILE")}


def test_settings_are_built_without_touching_the_environment_of_the_process() -> None:
    assert build_settings(None, None, None, NO_FLAGS, {}) == Settings()


@pytest.mark.slow
def test_help_needs_neither_torch_nor_the_web_framework() -> None:
    script = (
        "import sys; from lorikeet.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit([m for m in ('torch', 'transformers', 'fastapi', 'numpy') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


class FakeServer(ThreadingHTTPServer):
    """Answers like a server with one adapter, and remembers what it was asked."""

    def __init__(self, address: Any = ("127.0.0.1", 0)) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__(address, Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "boom":
            return 429, b'{"error": {"message": "too many requests"}}'
        pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("Good", "bye")]
        return 200, sse(*pieces, {"choices": []})


class Answers(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        known = self.path in ("/v1/models", "/v1/models/alias")
        self.send(200, b'{"data": [{"id": "base"}, {"id": "formal"}]}') if known else self.send(404, b"not here")

    def do_POST(self) -> None:
        self.send(*self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class FakeSocketServer(FakeServer):
    """The same on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("here", 0)


@contextmanager
def answering(server: FakeServer) -> Iterator[FakeServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with answering(FakeServer()) as server:
        yield server


def conversation(server: FakeServer) -> tuple[Conversation, list[str]]:
    return Conversation(ServerClient(server.url), max_tokens=5), []


def test_a_chat_streams_the_answer_and_sends_it_along_with_the_next_message(server: FakeServer) -> None:
    chat, written = conversation(server)
    assert chat.take("hello", written.append)
    assert chat.take("again", written.append)
    assert written == ["Good", "bye", "\n"] * 2
    assert server.bodies[0]["model"] == "base"
    assert server.bodies[0]["max_tokens"] == 5
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["hello", "Goodbye", "again"]


def test_a_chat_changes_its_adapter_and_refuses_one_that_is_not_there(server: FakeServer) -> None:
    chat, written = conversation(server)
    chat.take("/adapter klingon", written.append)
    assert "no adapter is called klingon" in written[-1]
    chat.take("/adapter formal", written.append)
    chat.take("hello", written.append)
    chat.take("/adapter", written.append)
    assert server.bodies[-1]["model"] == "formal"
    assert chat.model == "base"


def test_a_chat_with_a_model_that_is_not_served_ends_at_once(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        Conversation(ServerClient(server.url), "klingon")
    assert ended.value.code == 1
    assert "unknown model 'klingon'; choose one of: base, formal" in capsys.readouterr().err
    assert Conversation(ServerClient(server.url), "alias").model == "alias"


def test_a_chat_forgets_and_ends_on_command(server: FakeServer) -> None:
    chat, written = conversation(server)
    chat.take("hello", written.append)
    chat.take("/new", written.append)
    chat.take("again", written.append)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["again"]
    assert not chat.take("/quit", written.append)


def test_a_chat_goes_on_after_an_answer_that_failed_and_one_that_was_broken_off(server: FakeServer) -> None:
    chat, written = conversation(server)
    assert chat.take("boom", written.append)
    assert "too many requests" in written[-1]

    def stop_at_once(piece: str) -> None:
        if piece == "bye":
            raise KeyboardInterrupt
        written.append(piece)

    assert chat.take("hello", stop_at_once)
    assert chat.take("again", written.append)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["hello", "Good", "again"]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_server_may_be_named_by_its_base_url_too(server: FakeServer, end: str) -> None:
    api = ServerClient(server.url + end)
    assert [card["id"] for card in api.get("/v1/models")["data"]] == ["base", "formal"]


def test_a_server_on_a_socket_is_reached_by_the_address_that_it_prints(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with answering(FakeSocketServer(path)) as server:
        chat, written = Conversation(ServerClient(f"unix:{path}")), []
        assert chat.take("hello", written.append)
        assert (written, len(server.bodies)) == (["Good", "bye", "\n"], 1)
    result = runner.invoke(app, ["adapters", "list", "--url", f"unix:{path}x"])
    assert result.exit_code == 1
    assert f"unix:{path}x: [Errno 2] No such file or directory; is a server running there?" in result.output


def test_an_error_in_another_form_than_openais_is_shown_as_it_is(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ServerClient(server.url).get("/elsewhere")
    assert "404: not here" in capsys.readouterr().err


def test_an_error_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fail("one of zipf:A, drifting:A:S, rank-power:A[:B]")
    assert capsys.readouterr().err == "error: one of zipf:A, drifting:A:S, rank-power:A[:B]\n"


def test_a_server_that_is_not_there_is_named() -> None:
    result = runner.invoke(app, ["adapters", "list", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9: [Errno 111] Connection refused; is a server running there?" in result.output


def test_an_address_without_a_scheme_is_told_so() -> None:
    result = runner.invoke(app, ["adapters", "list", "--url", "127.0.0.1:9"])
    assert result.exit_code == 1
    assert "127.0.0.1:9: Request URL is missing an 'http://' or 'https://' protocol." in result.output


def test_an_inspection_tells_what_ia3_changes_and_whether_it_fits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "llama")
    sizes = read_model_config(tmp_path / "base").geometry(4).modules
    key = "base_model.model.model.layers.0.self_attn.{}_proj.ia3_l"
    tensors = {key.format(side): np.ones((sizes[side].out_features, 1), np.float32) for side in "kv"}
    folder = write_adapter(tmp_path / "ia3", tensors, peft_type="IA3", target_modules=["k_proj", "v_proj"])
    done = runner.invoke(app, ["adapters", "inspect", str(folder)])
    assert done.exit_code == 0, done.output
    assert "not changed by the adapter: q, o, gate, up, down" in done.output
    assert "fits:       not checked; name the base with --base" in done.output
    done = runner.invoke(app, ["adapters", "inspect", str(folder), "--base", str(tmp_path / "base")])
    assert done.exit_code == 0, done.output
    assert f"fits:       {tmp_path / 'base'}" in done.output
    write_adapter(folder, {key.format("k"): np.ones((3, 1), np.float32)}, peft_type="IA3", target_modules=["k_proj"])
    done = runner.invoke(app, ["adapters", "inspect", str(folder), "--base", str(tmp_path / "base")])
    assert done.exit_code == 1
    assert "has shape [3, 1]; the base model needs" in done.output


def test_what_changes_no_linear_layer_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    done = runner.invoke(app, ["adapters", "convert", str(tmp_path), str(tmp_path / "out"), "--base", "nowhere"])
    assert done.exit_code == 1
    assert "peft_type is 'PREFIX_TUNING', which is neither served nor converted" in done.output


def test_the_package_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lorikeet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("lorikeet ")


def test_inspecting_something_else_than_an_adapter_says_what_is_missing(tmp_path: Path) -> None:
    result = runner.invoke(app, ["adapters", "inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "adapter_model.safetensors" in result.output
