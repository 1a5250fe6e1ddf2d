"""Write ``docs/configuration.md`` from the settings' own docstrings, defaults and flags.

.venv/bin/python docs/make_configuration.py
"""

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.cli.serve_flags import FLAGS
from lorikeet.config import Settings
from lorikeet.policies import POLICIES
from lorikeet.presets import AUTO_PRESET, CHOICES, PRESETS, Preset

PAGE = Path(__file__).with_name("configuration.md")

_OPTIONS = Preset.__struct_fields__

_HEAD = """\
# Settings

Made by `docs/make_configuration.py` from [config.py](../src/lorikeet/config.py) and
[serve_flags.py](../src/lorikeet/cli/serve_flags.py); do not edit.

```toml
[model]
model = "/models/Llama-3.1-8B-Instruct"

[engine]
max_num_seqs = 128

[adapters]
adapter_dir = "/srv/adapters"
allowed_sources = ["s3://bucket/team/", "hf://my-org/"]

[server]
port = 8000
admin_keys = ["change-me"]
```

    $ lorikeet serve --config lorikeet.toml
    $ LORIKEET_SERVER__PORT=8123 lorikeet serve --config lorikeet.toml      # the environment overrides the file
    $ lorikeet serve --config lorikeet.toml --port 8123                     # a flag overrides both

A setting comes from the first of these that has it: a flag of `lorikeet serve`; the environment, as
`LORIKEET_<SECTION>__<KEY>` (lists separated by commas); the TOML file of `--config`; the default. Unknown keys and
wrong values are errors that name their source.

Flags take sizes with units (`--memory 4GiB`); keys of the file and the environment take bytes. Flags of vLLM and SGLang
with the same meaning are accepted under their names. `--no-enable-prefix-caching` selects the preset
`lorikeet:plain-no-reuse`. With other presets `kv_after_finish` turns prefix caching on or off.

## Other variables

| variable | meaning |
|---|---|
| `LORIKEET_URL`, `LORIKEET_API_KEY` | server and its key, for the commands that talk to a server |
| `LORIKEET_BACKEND_KEY` | key of `lorikeet router` for its backends |
| `VLLM_API_KEY` | key of a server without another API key |
| `XDG_CACHE_HOME` | `lorikeet/models` in it (else in `~/.cache`) holds converted weights |
| `XDG_DATA_HOME` | `lorikeet/adapters` in it (else in `~/.local/share`) is the adapter store |
| `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` | cache and token for the Hugging Face hub, as in its own tools |
| `OMP_NUM_THREADS` | threads of one rank without `--threads` |
| `OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` | how idle threads of a rank wait; set unless `OMP_WAIT_POLICY` is given |
"""


def page() -> str:
    """Return the page as it should be."""
    return _HEAD + "".join(_section(field.name, field.type) for field in msgspec.structs.fields(Settings)) + _presets()


def _section(name: str, struct: type[msgspec.Struct]) -> str:
    summary, meanings = _read_docstring(struct)
    flags = {flag.setting: flag.names.replace("/", " ").split() for flag in FLAGS} | {"model.model": ["MODEL"]}
    lines = [f"\n## `[{name}]`\n\n{summary}\n\n| key | default | flag | meaning |\n|---|---|---|---|\n"]
    for field in msgspec.structs.fields(struct):
        names = ", ".join(f"`{flag}`" for flag in flags.get(f"{name}.{field.name}", ()))
        cells = (f"`{field.name}`", f"`{_toml(field.default)}`", names, meanings[field.name])
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


_OBJECTIVES = """\
Many decisions of `auto` delay one request to save others time: to load KV or to compute it again, to hold a step for a
transfer, to run prompts apart, to let host cores begin a prefill. `--objective` sets whose time counts; in
`lorikeet simulate` and `plan` it is `--engine objective=latency`. A request that has missed its limit (`--slo-ttft`,
`--slo-tpot`, or limits in the request) does not count.

| you serve | set | a delay counts |
|---|---|---|
| chats, which people read as they come | `mixed` | before the first token; a sixteenth as much after it |
| calls whose whole answer is awaited: tools, agents, extraction | `latency` | for each request alike |
| impatient users, without limits in requests | `goodput` | as with limits of 2 s to the first token, 0.2 s per token |
| batches, rollouts, evaluations | `throughput` | hardly for single requests; the engine's time counts |
"""


def _presets() -> str:
    """Return the table of policy options, and the tables of presets with their differences from the defaults."""
    meanings, default = _read_docstring(Preset)[1], Preset()
    lines = [
        "\n## Presets\n\n`engine.preset` names a preset, which sets every policy option.\n"
        f"`auto` is `{AUTO_PRESET}`. Options can be changed behind the name: `auto,admission=fair`. A policy's\n"
        "parameters follow its name in brackets: `dlora,batching=dlora(patience=64)`.\n"
        "These pages describe the presets: [memory.md](memory.md#presets), [admission.md](admission.md),\n"
        "[modes.md](modes.md) and, for several replicas, [cluster.md](cluster.md#presets).\n\n"
        f"{_OBJECTIVES}\n"
        "| option | default | meaning | values |\n|---|---|---|---|\n"
    ]
    for option in _OPTIONS:
        named = [_with_parameters(option, name) for name in POLICIES.get(option, ())]
        values = ", ".join(f"`{value}`" for value in CHOICES.get(option, named))
        lines.append(f"| `{option}` | `{_toml(getattr(default, option))}` | {meanings[option]} | {values} |\n")
    for group in PRESETS.groups():
        lines.append(f"\n### {group.title}\n\n| preset | differences from the defaults |\n|---|---|\n")
        for name, preset in group.presets.items():
            changed = [option for option in _OPTIONS if getattr(preset, option) != getattr(default, option)]
            choices = ", ".join(f"{option} `{_toml(getattr(preset, option))}`" for option in changed)
            lines.append(f"| `{name}` | {choices} |\n")
    return "".join(lines)


def _with_parameters(option: str, name: str) -> str:
    """Return a policy's name with its parameters and their defaults."""
    parameters = POLICIES[option].parameters(name)
    return f"{name}({', '.join(f'{key}={_toml(value)}' for key, value in parameters.items())})" if parameters else name


def _read_docstring(struct: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """Return the first line, and each attribute's meaning (two may share a line)."""
    text = inspect.getdoc(struct) or ""
    summary, _, attributes = text.partition("\n\nAttributes:\n")
    meanings: dict[str, str] = {}
    for names, meaning in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", attributes, re.MULTILINE):
        sentence = re.sub(r"\s+", " ", meaning).replace("``", "`")
        meanings |= dict.fromkeys(names.split(", "), sentence)
    return summary, meanings


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return str(list(value))
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
