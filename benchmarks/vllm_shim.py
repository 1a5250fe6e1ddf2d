"""What vLLM's tests need of vLLM: a server, and the names that they import. Copied to them as ``tests/conftest.py``.

``RemoteOpenAIServer`` starts Lorikeet with the arguments that a test gives to vLLM. Everything else of vLLM and torch
is a stand-in: a test that calls one is a test of vLLM's own code, and is skipped with that reason. Nothing of Lorikeet
is imported here.
"""

import base64
import importlib.abc
import importlib.machinery
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.request import urlopen

import pytest

HERE = Path(os.environ["LORIKEET_SCRATCH"])
RESULTS = HERE / "results.jsonl"
ANSWERS = json.loads(os.environ.get("LORIKEET_ANSWERS", "{}"))
"""Patterns of test ids, and what the model says in such tests. Empty: the model speaks for itself."""
COMMAND = json.loads(os.environ["LORIKEET_COMMAND"])
_SAID = HERE / "answers.json"
_START_S = 300


# --- the server ---------------------------------------------------------------------------------------


def in_hub_cache(repo_id: str, source: Path, copy=os.symlink) -> Path:
    """Put a folder into the hub's cache, where the server and the tests find it by its name without a network."""
    revision = "0" * 40
    entry = HERE / "hub" / f"models--{repo_id.replace('/', '--')}"
    snapshot = entry / "snapshots" / revision
    if not snapshot.exists():
        shutil.copytree(source, snapshot, copy_function=copy)
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text(revision)
    return snapshot


def model_folder(name: str) -> Path:
    """Return the folder of a model of any name; all are the same."""
    return Path(name) if Path(name).is_absolute() else in_hub_cache(name, Path(os.environ["LORIKEET_MODEL"]))


def adapter_folder(repo_id: str) -> str:
    """Return the folder of a sample adapter: the same one for the same name."""
    samples = sorted(file.parent for file in Path(os.environ["LORIKEET_ADAPTERS"]).glob("*/adapter_config.json"))
    # The server follows no links that lead outside its folder of adapters.
    return str(in_hub_cache(repo_id, samples[sum(repo_id.encode()) % len(samples)], shutil.copy))


def fetched(repo_id: str) -> str:
    """Return the folder of a model or an adapter that a test downloads."""
    is_model = repo_id.startswith(("meta-llama/", "ibm-granite/"))
    return str(model_folder(repo_id)) if is_model else adapter_folder(repo_id)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _local(flag):
    """Return a part of the command line as Lorikeet takes it: ``name=org/repo`` with the folder of that adapter."""
    if flag == "--lora-module":  # vLLM's parser takes the beginning of a flag for it
        return "--lora-modules"
    name, _, source = flag.partition("=")
    return f"{name}={adapter_folder(source)}" if re.fullmatch(r"[\w.-]+/[\w.-]+=[\w.-]+/[\w.-]+", flag) else flag


class RemoteOpenAIServer:
    """Starts a server for a ``with`` block. A flag that it does not know is left out, and noted in the results."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True, **others):
        if others.get("override_hf_configs"):
            pytest.skip("needs another model")
        flags = [_local(str(flag)) for flag in vllm_serve_args]
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        self.host = "127.0.0.1"
        self.port = free_port()
        self.show_hidden_metrics = any(flag.startswith("--show-hidden-metrics") for flag in flags)
        model_folder(model)
        extra = ["--adapter-dir", str(HERE), "--adapter-dir-mode", "allow", "--port", str(self.port)]
        extra += ["--store-dir", str(HERE / f"store-{self.port}")]  # with no adapters of other tests
        if not any(flag.replace("_", "-") == "--max-model-len" for flag in flags):
            extra += ["--max-model-len", "2048"]
        self._log = HERE / "server.log"
        self._start([model, *flags], extra, env_dict)

    def _start(self, arguments, extra, env_dict):
        left_out = []
        while True:
            command = [*COMMAND, *arguments, *extra]
            with self._log.open("ab") as log:
                begin = log.tell()
                variables = {**os.environ, **(env_dict or {}), "LORIKEET_SAID": str(_SAID)}
                variables["PYTHONPATH"] = os.environ["LORIKEET_PYTHONPATH"]
                self.proc = subprocess.Popen(command, env=variables, cwd=HERE, stdout=log, stderr=log)
            if self._is_up():
                break
            said = re.sub(r"[│\s]+", " ", self._log.read_bytes()[begin:].decode(errors="replace"))
            found = re.search(r"No such option: (--[\w.-]+)", said) or re.search(r"(--[\w.-]+): ", said)
            if not found or found[1] not in {flag.partition("=")[0] for flag in arguments}:
                raise RuntimeError(f"the server did not start: {said[-600:]}")
            place = next(i for i, flag in enumerate(arguments) if flag.partition("=")[0] == found[1])
            end = place + 1
            while "=" not in arguments[place] and end < len(arguments) and not arguments[end].startswith("--"):
                end += 1
            left_out.append(" ".join(arguments[place:end]))
            del arguments[place:end]
        if left_out:
            note({"flags": left_out})

    def _is_up(self):
        until = time.monotonic() + _START_S
        while self.proc.poll() is None and time.monotonic() < until:
            if self.uds:
                with socket.socket(socket.AF_UNIX) as connection:  # the file is there before anybody listens
                    if connection.connect_ex(self.uds) == 0:
                        return True
            else:
                try:
                    with urlopen(self.url_for("health"), timeout=5):
                        return True
                except OSError:
                    pass
            time.sleep(0.05)
        if self.proc.poll() is None:
            self.proc.kill()
        return False

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    @property
    def url_root(self):
        return f"http://{Path(self.uds).name}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, kind, base_url, given):
        return kind(base_url=base_url, api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 600, **given})

    def get_client(self, **given):
        import openai

        return self._client(openai.OpenAI, self.url_for("v1"), given)

    def get_async_client(self, **given):
        import openai

        return self._client(openai.AsyncOpenAI, self.url_for("v1"), given)

    def get_client_anthropic(self, **given):
        import anthropic

        return self._client(anthropic.Anthropic, self.url_root, given)

    def get_async_client_anthropic(self, **given):
        import anthropic

        return self._client(anthropic.AsyncAnthropic, self.url_root, given)


# --- stand-ins for vLLM and torch ---------------------------------------------------------------------


class StandIn(ModuleType):
    """A module or a name of vLLM. It may be imported and passed on; a test that calls it is skipped."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made = type(name, (Exception,), {}) if name.endswith("Error") else StandIn(full)
        setattr(self, name, made)
        return made

    def __call__(self, *given, **named):
        if "PYTEST_CURRENT_TEST" not in os.environ:  # while tests are collected
            return StandIn(self.__name__)
        pytest.skip(f"tests {self.__name__.partition('.')[0]}'s own code: {self.__name__.rpartition('.')[2]}")

    __add__ = __call__

    def __mro_entries__(self, bases):
        return ()

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__


TORCH = os.environ.get("LORIKEET_TORCH", "")
"""Folder with a real torch, for tests that send tensors; empty: there is a stand-in."""
if TORCH:
    sys.path.append(TORCH)
    model_folder("facebook/opt-125m")  # is asked for while tests are collected


class HfRunner:
    """vLLM's helper, as far as tests use it: embeddings of prompts by the served model's own weights."""

    def __init__(self, model):
        self._folder = model_folder(model)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def get_prompt_embeddings(self, prompts):
        from safetensors import safe_open

        with safe_open(self._folder / "model.safetensors", "pt") as weights:
            table = weights.get_tensor("model.embed_tokens.weight")
        tokenizer = get_tokenizer(self._folder)
        return [table[tokenizer(prompt).input_ids] for prompt in prompts]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``vllm``, ``torch`` and what is below them."""

    names = ("vllm", "model_hosting_container_standards", "lm_eval", "PIL", *(() if TORCH else ("torch",)))

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        for name, value in KNOWN.get(module.__name__, {}).items():
            setattr(module, name, value)


class ModelConfig:
    """The vocabulary's size, which tests ask vLLM for."""

    def __init__(self, model, **others):
        self._config = json.loads((model_folder(model) / "config.json").read_text())

    def get_vocab_size(self):
        return self._config["vocab_size"]


class _Platform:
    def __getattr__(self, name):
        return lambda *given: False


def get_tokenizer(tokenizer_name, **others):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(tokenizer_name))


KNOWN = {
    "torch": {"iinfo": lambda kind: SimpleNamespace(min=-(2**63), max=2**63 - 1), "long": int},
    "vllm": {"__version__": "0.33.0"},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda name, **others: str(model_folder(name))
    },
    "vllm.multimodal.utils": {"encode_image_url": lambda image: image},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {
        "hf_api": lambda: SimpleNamespace(snapshot_download=lambda repo_id, **others: fetched(repo_id))
    },
    "vllm.utils.network_utils": {"get_open_port": free_port},
    "vllm.version": {"__version__": "0.33.0", "_prev_minor_version": lambda: "0.32"},
}

sys.meta_path.insert(0, _Finder())
sys.modules["tests.utils"] = utils = StandIn("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
utils.VLLM_PATH = HERE
utils.ROCM_EXTRA_ARGS = []
utils.multi_gpu_only = lambda **how: pytest.mark.skip("needs several GPUs")
utils.requires_fp8 = utils.large_gpu_mark = lambda *given, **how: pytest.mark.skip("needs a GPU")


class LocalAssetServer:
    """vLLM's server of images. Its files are pictures of the same formats, which tests get as ``data:`` URLs."""

    def get_image_asset(self, name):
        kind = "jpeg" if name.endswith(".jpg") else "png"
        content = (Path(os.environ["LORIKEET_IMAGES"]) / name).read_bytes()
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

    url_for = get_image_asset


@pytest.fixture(scope="session")
def hf_runner():
    return HfRunner


@pytest.fixture(scope="session")
def opt125_lora_files():
    return adapter_folder("peft-internal-testing/opt-125m-dummy-lora")


@pytest.fixture(scope="session")
def local_asset_server():
    return LocalAssetServer()


@pytest.fixture
def image_url(request, local_asset_server):
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request, local_asset_server):
    return [local_asset_server.url_for(name) for name in request.param]


# --- results ------------------------------------------------------------------------------------------


def note(value):
    with RESULTS.open("a") as file:
        file.write(json.dumps(value) + "\n")


def pytest_configure(config):
    config.addinivalue_line("markers", "skip_global_cleanup")


@pytest.fixture(autouse=True)
def _say(request):
    """Tell the server what the model says in this test."""
    name = _id(request.node.nodeid)
    _SAID.write_text(json.dumps(next((said for key, said in ANSWERS.items() if fnmatch(name, key)), [])))


def _id(nodeid):
    return nodeid.removeprefix("tests/entrypoints/")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else text
        note({"id": _id(report.nodeid), "outcome": report.outcome, "message": message})


def pytest_collectreport(report):
    if report.failed:
        note({"file": _id(report.nodeid), "message": str(report.longrepr)[-500:]})
