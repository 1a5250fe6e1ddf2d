"""What the lines memory.4 to memory.6 share: conversations over many adapters, live and modelled, and peaks."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accept.rigs import MachineRigs, with_default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.traces import MOONCAKE_CONVERSATION, unpacked
from lorikeet.bench.lengths import scaled_block_tokens
from lorikeet.bench.memory_bench import MemorySetting, Rig, row_figures, run_row
from lorikeet.bench.memory_work import MemoryWork, WorkingSet, working_set
from lorikeet.bench.peak import Peak, find_peak
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names, spread
from lorikeet.bench.workload import MOONCAKE_BLOCK_TOKENS, WorkloadRequest, read_any
from lorikeet.config import EngineSettings, Settings

ADAPTERS, RANKS, CHOICE = 100, (32, 64), "zipf:1.5"
REQUESTS, LEAST_TURNS, MOST_TOKENS, STEP_TOKENS = 300, 3, 500, 256
SCALE, ANSWER_SCALE = 1 / 32, 1 / 8
"""Of prompts and of answers. A token of a prompt takes a fifteenth of a decode step on the reference machine, and less
than a fiftieth on a GPU: so a request spends about as much of its time in prefill as it would there."""
LINK_BYTES_PER_S = 0.8e9
OURS, S_LORA, STATIC, DISCARDING = "elora", "elora:s-lora", "vllm-static", "vllm-static:discard"
RIVALS = (S_LORA, DISCARDING, STATIC)
SLO_TIMES, UNLOADED_RATE = 5, 0.05
LOAD = 0.8


@cache
def _trace() -> tuple[WorkloadRequest, ...]:
    with unpacked(MOONCAKE_CONVERSATION) as file:
        return tuple(read_any(file))


def conversations(rate: float, count: int = REQUESTS) -> MemoryWork:
    """Return the same conversations at any rate, closer together or further apart; at least so many requests."""
    names = tuple(adapter_names(ADAPTERS))
    recipe = Recipe(
        trace=_trace(),
        shape="chat",
        rates=Rates.constant(rate),
        count=count,
        adapters=names,
        ranks=tuple(spread(RANKS, ADAPTERS)),
        adapter_choice=CHOICE,
        length_scale=SCALE,
        answer_scale=ANSWER_SCALE,
        most_tokens=MOST_TOKENS,
        least_turns=LEAST_TURNS,
        seed=7,
    )
    return MemoryWork(recipe.requests(), names, scaled_block_tokens(MOONCAKE_BLOCK_TOKENS, SCALE), recipe.seed)


class MemoryRuns:
    """Runs of one workload by one quick profile of this machine, which drifts from one quarter of an hour to the next.

    Args:
        scratch: an empty folder, for adapters.
        line: which keeps them as its parts.
        name: of the profile and of all that is run by it; ends the names of the parts.
    """

    def __init__(self, scratch: Path, line: str, name: str) -> None:
        self._runs = StoredRuns(line)
        self._name = name
        self.work = cache(conversations)
        self._rigs = MachineRigs(
            self._runs, self.work(1.0), RANKS, scratch, profile_part=self._part("profile"), quick=True
        )
        self._modelled = cache(self._model)

    def _part(self, name: str) -> str:
        return f"{name}-{self._name}"

    # --- what it runs on -----------------------------------------------------------------------------

    @cached_property
    def filled(self) -> WorkingSet:
        """What the workload fills."""
        rig = self._rigs.modelled
        return working_set(self.work(1.0), rig.adapters, rig.geometry, EngineSettings().block_tokens)

    def setting(self, *, paced: bool = True) -> MemorySetting:
        """Return a device pool of a quarter of the working set and a host pool for all of it and all other adapters."""
        return with_default_model(
            MemorySetting(
                memory_bytes=self.filled.total_bytes // 4,
                host_memory_bytes=self.filled.host_bytes,
                link_bytes_per_s=LINK_BYTES_PER_S if paced else 0.0,
                max_model_tokens=MOST_TOKENS,
                max_step_tokens=STEP_TOKENS,
            )
        )

    @property
    def profile_stolen(self) -> float:
        """What share of the processors' time others took of the profile's measurement."""
        return self._rigs.profile_stolen

    # --- runs ----------------------------------------------------------------------------------------

    def live(self, part: str, row: str, rate: float, *, paced: bool = True) -> dict[str, Any]:
        """Return a live run that others on the hardware disturbed little, if that can be had.

        Returns:
            Its rate, the row's figures, TTFT and TPOT of every request, ``stolen`` and ``drift``; see
            ``MachineRigs.run_live``.
        """

        def measure() -> dict[str, Any]:
            settings = self.setting(paced=paced).settings(row)
            return self._rigs.run_live(settings, lambda rig, settings: self._run(rig, settings, rate))

        return whole(self._runs.get(self._part(part), measure))

    def modelled(self, row: str, rate: float, drift: float = 0.0) -> dict[str, Any]:
        """Return the same run by the profile, on a machine that is as much slower than it says as ``drift``."""
        return self._modelled(row, rate, drift)

    def _model(self, row: str, rate: float, drift: float) -> dict[str, Any]:
        return self._run(self._rigs.drifted(drift), self.setting().settings(row), rate)

    def _run(self, rig: Rig, settings: Settings, rate: float) -> dict[str, Any]:
        done = run_row(rig, settings, self.work(rate))
        exchanges = done.run.exchanges
        return {
            "rate": rate,
            "figures": row_figures(settings.engine.row, done),
            "ttft_s": [exchange.ttft_s for exchange in exchanges],
            "tpot_s": [exchange.tpot_s for exchange in exchanges],
        }

    # --- peaks ---------------------------------------------------------------------------------------

    @cached_property
    def slo_s(self) -> float:
        """Limit of the mean TTFT: a multiple of what ours has when every request is alone."""
        return SLO_TIMES * float(self.modelled(OURS, UNLOADED_RATE)["figures"]["ttft_mean_s"])

    def peak(self, row: str) -> Peak:
        """Search the highest rate at which the mean TTFT stays below the limit (ELORA's peak load, section VIII-A)."""

        def attainment(rate: float) -> float:
            return self.slo_s / float(whole(self.modelled(row, rate))["figures"]["ttft_mean_s"])

        def search() -> dict[str, Any]:
            return {"peak": msgspec.to_builtins(find_peak(attainment, 1.0, 1.0, precision=0.02))}

        return msgspec.convert(self._runs.get(self._part(f"peak-{part_name(row)}"), search)["peak"], Peak)

    def peak_rate(self, row: str) -> float:
        """Return its rate.

        Raises:
            RuntimeError: there is none.
        """
        rate = self.peak(row).rate
        if rate is None:
            raise RuntimeError(f"{row}: no rate meets a mean TTFT of {self.slo_s:.3f} s")
        return rate

    def words(self) -> str:
        """Say what is run on what."""
        work, filled, setting = self.work(1.0), self.filled, self.setting()
        conversations = len({request.conversation for request in work.requests})
        return (
            f"{len(work.requests)} requests of {conversations} whole conversations of at least {LEAST_TURNS} turns of "
            f"Mooncake's trace (Apache-2.0), prompts divided by {1 / SCALE:.0f} and answers by "
            f"{1 / ANSWER_SCALE:.0f}, next turns with the answers as generated; {ADAPTERS} adapters of ranks "
            f"{' and '.join(map(str, RANKS))} on q, k, v, o, chosen by {CHOICE}; working set "
            f"{_mib(filled.total_bytes)} ({_mib(filled.adapter_bytes)} adapters asked for, {_mib(filled.kv_bytes)} "
            f"KV), device pool {_mib(setting.memory_bytes)}, host pool {_mib(setting.host_memory_bytes)}, declared "
            f"link {LINK_BYTES_PER_S / 1e9:g} GB/s each way; at most {STEP_TOKENS} tokens in a step"
        )


@contextmanager
def memory_runs(line: str, name: str) -> Iterator[MemoryRuns]:
    """Yield the runs, with a folder that is removed in the end; see ``MemoryRuns``."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-memory-") as scratch:
        yield MemoryRuns(Path(scratch), line, name)


def paired(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the values of two sides by repeat, without requests that lack one anywhere (TPOT of one token)."""
    whole = [
        place
        for place in range(len(ours[0][name]))
        if all(run[name][place] is not None for side in (ours, theirs) for run in side)
    ]
    kept = [[[run[name][place] for place in whole] for run in side] for side in (ours, theirs)]
    return kept[0], kept[1]


def whole(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run if every request was answered."""
    figures = run["figures"]
    if figures["completed"] != figures["requests"]:
        raise RuntimeError(f"{figures['preset']}: {figures['completed']} of {figures['requests']}: {figures['errors']}")
    return run


def part_name(row: str) -> str:
    """Return a row's name as part of a file's name."""
    return row.replace(":", "-")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
