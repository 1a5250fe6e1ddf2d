"""serve.9: adapters survive a restart; ten thousand of them cost little at start-up and in /metrics."""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model, tiny_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.statistics import median_interval
from lorikeet.config import AdapterSettings
from lorikeet.models.config import read_model_config

ADAPTERS = 10_000
PAIRS = 5
GROWTH_S = 2.0
METRICS_BYTES = 10**6

_ASKED = 50
_GREEDY = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
_PROMPT = "The lorikeet is a bird that"


@line(
    "serve.9",
    title=f"Adapters after a restart; start-up and /metrics with {ADAPTERS:,} of them",
    bound=f"same answer after the restart, start-up grows ≤ {GROWTH_S:g} s, /metrics < {METRICS_BYTES:,} bytes",
)
def run(runs: StoredRuns) -> Result:
    """The restart on the default model, the ten thousand on a tiny one."""
    restart = runs.get("restart", _restart)
    many = runs.get("many", _many)
    growths_s = [full - empty for empty, full in many["ready_s"]]
    growth_s = statistics.median(growths_s)
    failures = [
        *(["the adapter did not answer the same after the restart"] if not restart["same"] else []),
        *(["the adapter answers as the base does"] if not restart["differs_from_base"] else []),
        *([f"start-up grows by {growth_s:.2f} s"] if growth_s > GROWTH_S else []),
        *([f"/metrics has {many['metrics_bytes']} bytes"] if many["metrics_bytes"] >= METRICS_BYTES else []),
    ]
    return Result(
        figure={
            "same_answer": restart["same"],
            "startup_growth_s": growth_s,
            "metrics_bytes": many["metrics_bytes"],
            "adapters": many["listed"],
        },
        interval=median_interval(growths_s),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"restart: SmolLM2-135M-Instruct, adapter loaded by API; {ADAPTERS:,} adapters: a two-layer model, "
        f"start-ups with none and with all in turns, {PAIRS} pairs, /metrics after requests for {_ASKED} of them; "
        "interval of the growth",
    )


def _restart() -> dict[str, Any]:
    model = default_model()
    geometry = read_model_config(model).geometry(2)
    with tempfile.TemporaryDirectory(prefix="lorikeet-serve9-") as text:
        scratch = Path(text)
        write_random_adapter(scratch / "sources" / "made", geometry, 16, seed=9)

        def start() -> AbstractContextManager[RunningServer]:
            flags = [str(model), "--adapter-dir", f"{scratch}/sources", "--store-dir", f"{scratch}/store"]
            return running_server(flags, scratch / "serve.log")

        with start() as server:
            body = {"lora_name": "made", "lora_path": f"{scratch}/sources/made"}
            httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
            base = server.complete(model.name, _PROMPT, **_GREEDY)
            before = server.complete("made", _PROMPT, **_GREEDY)
        with start() as server:
            after = server.complete("made", _PROMPT, **_GREEDY)
    return {"same": before == after, "differs_from_base": before != base, "answer": after}


def _many() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-serve9-") as text:
        scratch = Path(text)
        model = tiny_model(scratch / "tiny")
        _register_many(model, scratch / "full")
        pairs, metrics_bytes, listed = [], 0, 0
        for pair in range(PAIRS):
            ready_s = {}
            order: Sequence[str] = ("empty", "full") if pair % 2 else ("full", "empty")
            for store in order:
                flags = [str(model), "--store-dir", str(scratch / store)]
                with running_server(flags, scratch / f"{store}.log") as server:
                    ready_s[store] = server.ready_s
                    if store == "full" and pair == PAIRS - 1:
                        metrics_bytes, listed = _ask_and_scrape(server)
            pairs.append((ready_s["empty"], ready_s["full"]))
    return {"ready_s": pairs, "metrics_bytes": metrics_bytes, "listed": listed}


def _register_many(model: Path, store: Path) -> None:
    """Register through the catalog, as the server does, all versions distinct."""
    geometry = read_model_config(model).geometry(2)
    catalog = AdapterCatalog(AdapterSettings(store_dir=str(store), adapter_dir=str(store.parent)), model.name, geometry)
    folder = store.parent / "source"
    for number in range(ADAPTERS):
        write_random_adapter(folder, geometry, 1, modules=("q",), seed=number)
        catalog.register(f"adapter-{number:05}", str(folder))
    catalog.close()


def _ask_and_scrape(server: RunningServer) -> tuple[int, int]:
    for number in range(0, ADAPTERS, ADAPTERS // _ASKED):
        server.complete(f"adapter-{number:05}", _PROMPT, **_GREEDY)
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).content
    listed = httpx.get(f"{server.url}/v1/adapters?limit=1", timeout=60).json()["total"]
    return len(metrics), int(listed)
