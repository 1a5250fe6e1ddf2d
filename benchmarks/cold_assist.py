"""Measures the delay of the first token by a cold adapter, with and without the assistance of host cores.

Every request is the only request for its adapter, which is in the host tier. Mean TTFT of the default preset is
compared with that of the same preset with every adapter on the device, and with waiting for the adapter.

    python -m benchmarks.cold_assist            # modelled: Llama-2-7B on an A100 with TOPPINGS' host, slow link
    python -m benchmarks.cold_assist --live     # SmolLM2 on this machine, over a declared link
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness import (
    THREADS,
    default_model,
    in_turns,
    make_requests,
    print_setup,
    print_table,
    ratios,
    replica,
    with_interval,
)
from benchmarks.papers.runs import Engine, run_engine, work_of
from lorikeet.adapters.store import reference
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import FirstToken
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.costs.assist_costs import UNIT_MODULES
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.build import Replica
from lorikeet.engine.driver import wait_for_work
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import write_random_adapter
from lorikeet.workloads.synthetic import adapter_names
from lorikeet.workloads.workload import WorkloadRequest

AUTO: Final = "lorikeet:auto,prefetch=none"
PRESETS: Final = {
    "assist": AUTO,
    "wait": f"{AUTO},cold_start=wait",
    "all cached": "lorikeet:auto,prefetch=all,cold_start=wait",
}
MODULES: Final = {"q, k, v": UNIT_MODULES, "all": LORA_MODULES}

PROFILE = "a100-80-llama-2-7b"
LINK_BYTES_PER_S = 3.1e9
RANK = 64
REQUESTS = 100
RATE = 2.0
"""The link is the one that TOPPINGS' figures imply (docs/papers/toppings.md)."""


def modelled() -> None:
    """Print the modelled mean TTFT of cold distinct adapters, beside the mean with all adapters cached."""
    known = load_profile(PROFILE)
    rows = []
    assert known.host_lora is not None
    for label, modules in MODULES.items():
        for tokens in (256, 512, 1024):
            for share in (1, 4):
                host = msgspec.structs.replace(known.host_lora, cores=known.host_lora.cores // share)
                profile = msgspec.structs.replace(known, host_lora=host)
                ttft = {name: modelled_ttft_s(profile, preset, modules, tokens) for name, preset in PRESETS.items()}
                against = [f"{ttft[name] / ttft['all cached']:.2f}" for name in ("assist", "wait")]
                setting = f"{label}; {tokens} tokens; {host.cores} cores"
                rows.append([setting, *(f"{1e3 * each:.1f}" for each in ttft.values()), *against])
    title = f"{PROFILE}, link of {LINK_BYTES_PER_S / 1e9:g} GB/s, rank {RANK}: mean TTFT, ms"
    print_table(title, ["modules; prompt; host cores", *PRESETS, "assist ÷ cached", "wait ÷ cached"], rows)


def modelled_ttft_s(
    profile: CostProfile, preset: str, modules: Sequence[str], tokens: int, count: int = REQUESTS
) -> float:
    """Return the mean TTFT of requests that are each the only request for an adapter in the host tier."""
    engine = Engine(
        profile=profile,
        adapters=count,
        ranks=(RANK,),
        modules=tuple(modules),
        link_bytes_per_s=LINK_BYTES_PER_S,
        settle=True,
    )
    names = tuple(adapter_names(count))
    requests = [WorkloadRequest(number / RATE, name, tokens, 16) for number, name in enumerate(names)]
    figures = run_engine(preset, engine, work_of(requests, names, 0), _ttft)
    return float(statistics.fmean(figures["own_ttft_s"]))


def _ttft(exchanges: Sequence[RequestResult]) -> dict[str, list[float]]:
    return {"own_ttft_s": [each.token_times_s[0] - each.due_s for each in exchanges]}


LIVE_LINK = 0.1e9
LIVE_RANK = 32
LIVE_ADAPTERS = 8
PROMPT_TOKENS = 64
ROUNDS = 5


def live() -> None:
    """Print the same table for SmolLM2 on this machine.

    Rounds are interleaved, and ratios are computed within a round. Steps leave one core to the host worker.
    """
    rows = []
    for label, modules in MODULES.items():
        with ExitStack() as stack:
            refs = stack.enter_context(_adapters(modules))
            built = {name: stack.enter_context(_engine(preset, refs)) for name, preset in PRESETS.items()}

            sides = {name: partial(_mean_ttft_s, engine, refs, name) for name, engine in built.items()}
            found = in_turns(sides, ROUNDS, 1)
        cells = [with_interval([1e3 * each for each in found[name]], ".0f") for name in PRESETS]
        against = [with_interval(ratios(found[name], found["all cached"]), ".2f") for name in ("assist", "wait")]
        rows.append([label, *cells, *against])
    title = f"SmolLM2, {PROMPT_TOKENS} tokens, link of {LIVE_LINK / 1e9:g} GB/s, rank {LIVE_RANK}: mean TTFT, ms"
    print_table(title, ["modules", *PRESETS, "assist ÷ cached", "wait ÷ cached"], rows)


@contextmanager
def _adapters(modules: Sequence[str]) -> Iterator[list[AdapterRef]]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
        geometry = read_model_config(default_model()).geometry(2)
        refs = []
        for number in range(LIVE_ADAPTERS):
            folder = Path(scratch) / f"adapter-{number}"
            write_random_adapter(folder, geometry, LIVE_RANK, modules=tuple(modules), seed=number)
            refs.append(reference(f"adapter-{number}", folder, geometry))
        yield refs


@contextmanager
def _engine(preset: str, refs: Sequence[AdapterRef]) -> Iterator[Replica]:
    """Return an engine whose host tier holds the adapters.

    The device has room for few of them, unless all are cached.
    """
    with replica(
        default_model(),
        preset=preset,
        threads=THREADS - 1,
        link_bytes_per_s=LIVE_LINK,
        host_memory_bytes=2**30,
    ) as built:
        built.engine.register_adapters(tuple(refs))
        _settle(built)
        yield built


def _settle(built: Replica) -> None:
    while built.engine.has_transfers or built.engine.host_fill_pending:
        built.engine.step()
        if built.engine.has_transfers:
            built.engine.wait_for_transfer(1.0)


def _mean_ttft_s(built: Replica, refs: Sequence[AdapterRef], name: str, number: int) -> float:
    return statistics.fmean(_first_tokens_s(built, refs, name))


def _first_tokens_s(built: Replica, refs: Sequence[AdapterRef], name: str) -> list[float]:
    """Return the TTFT of one request for each adapter, one after another.

    Afterwards the device's adapters are evicted.
    """
    engine = built.engine
    clock = MonotonicClock()
    seconds = []
    for request in make_requests(name, len(refs), PROMPT_TOKENS, 2, refs):
        began_s = clock.now()
        engine.submit(msgspec.structs.replace(request, arrival_s=began_s))
        while engine.has_requests:
            for event in engine.step().events:
                if isinstance(event, FirstToken):
                    seconds.append(event.at_s - began_s)
            if not engine.is_busy and engine.has_requests:
                wait_for_work(engine, clock, math.inf)
    if name != "all cached":
        for ref in refs:
            engine.drop_adapter(ref.digest)
        while engine.memory_stats().device.adapters or engine.memory_stats().host.adapters:
            engine.step()
        engine.register_adapters(tuple(refs))
    _settle(built)
    return seconds


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="measure on this machine")
    print_setup()
    if parser.parse_args().live:
        live()
    else:
        modelled()


if __name__ == "__main__":
    main()
