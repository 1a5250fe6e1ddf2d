"""cluster.2: eight live paced replicas under LoRAServe and its rivals, and two real ones that answer as one does.

28 live runs of some three and a half minutes each, beside the simulations that search the peaks.
"""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np
from transformers import AutoTokenizer

from benchmarks.accept.cluster_live import (
    PROFILE,
    LiveOutcome,
    LiveSetting,
    engine_settings,
    run_apart,
    simulate_setting,
)
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.parity import PeerAnswer, compare
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.serve_2 import ADAPTERS, MAX_TIES, QUESTIONS
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.peak import find_peak
from lorikeet.bench.statistics import Ratio, p95_of, ratio_over_requests
from lorikeet.cluster.open import open_cluster
from lorikeet.config import AdapterSettings, ClusterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Request, SamplingParams
from lorikeet.core.slo import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import OperatingLoads
from lorikeet.engine.client import EngineClient
from lorikeet.engine.streams import RequestHandle
from lorikeet.models.config import read_model_config
from lorikeet.simulator.operating_points import BRIEF, find_operating_loads

OURS = "loraserve"
RANDOM, CONTIGUOUS, TOPPINGS = (f"{OURS}:{rival}" for rival in ("random", "contiguous", "toppings"))
BOUNDS = {RANDOM: 0.5, CONTIGUOUS: 0.5, TOPPINGS: 1.05}
"""Of the 95th percentile of TTFT, to each rival's, at that one's load."""
PEAK_BOUND, HELD_BOUND = 1.25, 0.4
LOAD, BEYOND = 0.8, 1.15
REPEATS, STRETCH = 3, 1.5
ATTAINMENT = 0.95
"""Share of requests within the limit: their 95th percentile is."""
FIRST_RATE, PRECISION = 24.0, 0.05
PADDED, UNPADDED = KernelForm.PADDED, KernelForm.UNPADDED

REQUESTS, TOKENS = 32, 64


@line(
    "cluster.2",
    title="Eight live paced replicas under shifting skew: loraserve and its rivals",
    bound=f"P95 TTFT at {LOAD:.0%} of each rival's peak "
    + ", ".join(f"≤ {bound:g} × {rival}" for rival, bound in BOUNDS.items())
    + f"; peak load ≥ {PEAK_BOUND:g} × {RANDOM}, met live and missed at {BEYOND:g} ×; adapter bytes per replica "
    f"≤ {HELD_BOUND:g} of full replication; two real replicas: the tokens of one (ties ≤ {MAX_TIES})",
)
def run(runs: StoredRuns) -> Result:
    """Search peaks by simulation; run everybody live at each rival's load, in turns; compare tokens."""
    cluster = ClusterRuns(runs)
    padded = cluster.comparison(PADDED, REPEATS)
    probes = cluster.probes()
    tokens = runs.get("tokens", compare_tokens)
    unpadded = cluster.comparison(UNPADDED, 1)
    peaks = cluster.peaks(PADDED, REPEATS)
    lives = [outcome for pairs in padded.values() for pair in pairs for outcome in pair]
    held = fmean(ours.held_share for pairs in padded.values() for ours, _ in pairs)
    gain = peaks[OURS][0] / median(peaks[RANDOM])
    ratios = {rival: p95_ratio(pairs) for rival, pairs in padded.items()}
    failures = [
        *ttft_failures(ratios, padded),
        *([f"peak is {gain:.2f} × {RANDOM}'s"] if gain < PEAK_BOUND else []),
        *probe_failures(probes),
        *([f"a replica holds {held:.2f} of all adapter bytes"] if held > HELD_BOUND else []),
        *token_failures(tokens),
    ]
    return Result(
        figure={
            **{f"P95 TTFT ÷ {rival}": ratio.value for rival, ratio in ratios.items()},
            f"peak ÷ {RANDOM}": gain,
            "held": held,
            "peaks": {row: " ".join(f"{rate:.1f}/s" for rate in found) for row, found in peaks.items()},
            "P95 TTFT": {rival: _p95_words(pairs) for rival, pairs in padded.items()},
            "within the limit": {_probe_words(probe): f"{each.attainment:.1%}" for probe, each in probes.items()},
            "unpadded": {rival: _finding(pairs) for rival, pairs in unpadded.items()},
            "cores in use": cpu_words(lives),
            "tokens": tokens["words"],
        },
        interval=(ratios[RANDOM].low, ratios[RANDOM].high),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"paced by {PROFILE}; all times, periods of placement included, are stretched by {STRETCH:g} and given "
        "back divided by it; engines decide anew after each step; all adapters fit into the host's memory; Ray and "
        "sockets, head in one process without HTTP; 25 adapters of ranks 8 to 128 on q, k, "
        "v and o, whose files are small stand-ins of these ranks (a copy takes milliseconds; bytes held are those of "
        f"whole ones); limit on P95 TTFT {_slo().ttft_s:g} s, the paper's; peaks by the modelled executor over runs "
        f"of the same length, of {RANDOM} for each of {REPEATS} draws, of which the median counts; {REPEATS} repeats "
        f"in turns, each of arrivals and a random placement of its own; interval: bootstrap over requests, P95 TTFT ÷ "
        f"{RANDOM}; unpadded: one repeat, a finding without a bound",
        details={
            "padded": _details(padded),
            "unpadded": _details(unpadded),
            "probes": {_probe_words(probe): _plain(each) for probe, each in probes.items()},
            "intervals": {rival: ratio._asdict() for rival, ratio in ratios.items()},
            "tokens": tokens,
        },
    )


Pair = tuple[LiveOutcome, LiveOutcome]
"""Ours and a rival under one workload."""


class ClusterRuns:
    """The line's runs; each is stored when it has ended."""

    def __init__(self, runs: StoredRuns) -> None:
        self._runs = runs

    def comparison(self, form: KernelForm, repeats: int) -> dict[str, list[Pair]]:
        """Run ours and each rival live at the rival's load, repeat after repeat, and who is first changes."""
        found: dict[str, list[Pair]] = {rival: [] for rival in BOUNDS}
        for repeat in range(repeats):
            for number, rival in enumerate(BOUNDS):
                rate = LOAD * self._peak_of(form, rival, repeat)
                turns = (OURS, rival) if (repeat + number) % 2 else (rival, OURS)
                outcomes = {
                    row: self._live(
                        f"{form}-{_short(rival)}-{repeat}-{_short(row)}", self._setting(form, row, rate, repeat)
                    )
                    for row in turns
                }
                found[rival].append((outcomes[OURS], outcomes[rival]))
        return found

    def probes(self) -> dict[tuple[str, float], LiveOutcome]:
        """Run live at the two peaks that are compared, and beyond them: by row and multiple of its peak."""
        return {
            (row, times): self._live(
                f"probe-{_short(row)}-{times:g}", self._setting(PADDED, row, times * self._peak_of(PADDED, row, 0), 0)
            )
            for row in (OURS, RANDOM)
            for times in (1.0, BEYOND)
        }

    def peaks(self, form: KernelForm, repeats: int) -> dict[str, list[float]]:
        """Return the peaks of every row: one, or one for each draw of a placement."""
        draws = {RANDOM: repeats}
        return {
            row: [self._peak_of(form, row, repeat) for repeat in range(draws.get(row, 1))] for row in (OURS, *BOUNDS)
        }

    def _peak_of(self, form: KernelForm, row: str, repeat: int) -> float:
        """Return the highest rate within the limit on a virtual clock; only a placement that is drawn needs repeats."""
        drawn = repeat if row == RANDOM else 0
        found = self._runs.get(f"peak-{form}-{_short(row)}-{drawn}", partial(self._search, form, row, drawn))
        return float(found["rate"])

    def _search(self, form: KernelForm, row: str, repeat: int) -> dict[str, Any]:
        probes = []

        def probe(rate: float) -> float:
            outcome = simulate_setting(self._setting(form, row, rate, repeat))
            probes.append({"rate": rate, **msgspec.structs.asdict(outcome)})
            return outcome.attainment

        peak = find_peak(probe, ATTAINMENT, FIRST_RATE, precision=PRECISION)
        if peak.rate is None or peak.missed_rate is None:
            raise RuntimeError(f"{row}: no peak between rates {[each['rate'] for each in probes]}")
        return {"rate": peak.rate, "missed_rate": peak.missed_rate, "probes": probes}

    def _loads(self, form: KernelForm) -> OperatingLoads:
        """Return the operating points, which are the device's."""

        def find() -> dict[str, Any]:
            engine = engine_settings(f"{OURS},kernel_form={form}")
            loads = find_operating_loads(load_profile(PROFILE), engine, _slo(), (512, 128), search=BRIEF)
            return dict(msgspec.to_builtins(loads, str_keys=True))

        return msgspec.convert(self._runs.get(f"points-{form}", find), OperatingLoads, strict=False, str_keys=True)

    def _setting(self, form: KernelForm, row: str, rate: float, repeat: int) -> LiveSetting:
        return LiveSetting(
            row=row, loads=self._loads(form), rate=rate, kernel_form=form, repeat=repeat, stretch=STRETCH
        )

    def _live(self, part: str, setting: LiveSetting) -> LiveOutcome:
        stored = self._runs.get(f"live-{part}", lambda: dict(msgspec.to_builtins(run_apart(setting))))
        return msgspec.convert(stored, LiveOutcome)


def _slo() -> Slo:
    defaults = {field.name: field.default for field in msgspec.structs.fields(LiveSetting)}
    return Slo(ttft_s=defaults["slo_ttft_s"])


def _short(row: str) -> str:
    return row.replace(":", "-")


# --- verdicts ------------------------------------------------------------------------------------------


def p95_ratio(pairs: Sequence[Pair]) -> Ratio:
    """Return P95 TTFT of ours over the rival's, over the requests of all repeats."""
    ours, theirs = ([second for pair in pairs for second in pair[side].ttft_s] for side in (0, 1))
    return ratio_over_requests([ours], [theirs], p95_of, resamples=500)


def ttft_failures(ratios: Mapping[str, Ratio], pairs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Return whose bound is not met, and which rivals prove nothing as they are beyond their limit themselves."""
    beyond = [
        f"P95 TTFT is {each.value:.2f} × {rival}'s" for rival, each in ratios.items() if each.value > BOUNDS[rival]
    ]
    saturated = [
        f"{rival} is saturated at {LOAD:.0%} of its peak ({theirs.attainment:.1%} within the limit)"
        for rival, each in pairs.items()
        for _, theirs in each
        if theirs.attainment < ATTAINMENT
    ]
    return beyond + saturated


def probe_failures(probes: Mapping[tuple[str, float], LiveOutcome]) -> list[str]:
    """Return which peaks are not confirmed live."""
    return [
        f"{_probe_words(probe)} has {outcome.attainment:.1%} within the limit"
        for probe, outcome in probes.items()
        if (outcome.attainment >= ATTAINMENT) != (probe[1] <= 1)
    ]


def _probe_words(probe: tuple[str, float]) -> str:
    row, times = probe
    return f"{row} at {times:g} × its peak"


def token_failures(tokens: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the tokens of two replicas."""
    return [
        *([f"requests {tokens['different']} differ from one replica's"] if tokens["different"] else []),
        *([f"{tokens['ties']} ties"] if tokens["ties"] > MAX_TIES else []),
        *(["a replica got no request"] if len(tokens["requests"]) < 2 else []),
    ]


def cpu_words(outcomes: Sequence[LiveOutcome]) -> str:
    """Say how many cores were in use, by whom, on average and at most."""
    head, engines, others = (
        fmean(getattr(each, f"cpu_{who}") for each in outcomes) for who in ("head", "engines", "others")
    )
    most, late_ms = max(each.cpu for each in outcomes), max(each.late_p99_ms for each in outcomes)
    return (
        f"{head + engines + others:.2f} of {outcomes[0].cores} (head {head:.2f}, engines {engines:.2f}, Ray "
        f"{others:.2f}), at most {most:.2f}; 99 % of the requests sent within {late_ms:.0f} ms"
    )


def _p95_words(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{ours.ttft_p95_s:.2f} and {theirs.ttft_p95_s:.2f} s" for ours, theirs in pairs)


def _finding(pairs: Sequence[Pair]) -> str:
    return f"{p95_ratio(pairs).value:.2f} ({_p95_words(pairs)})"


def _details(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    return {rival: [[_plain(outcome) for outcome in pair] for pair in each] for rival, each in pairs.items()}


def _plain(outcome: LiveOutcome) -> dict[str, Any]:
    """Return an outcome without its single requests."""
    p50, p95, p99 = np.percentile(outcome.ttft_s, [50, 95, 99]).tolist()
    fields = msgspec.structs.asdict(outcome)
    requests = len(fields.pop("ttft_s"))
    return {"requests": requests, "ttft_p50_s": p50, "ttft_p95_s": p95, "ttft_p99_s": p99, **fields}


# --- tokens --------------------------------------------------------------------------------------------


def compare_tokens() -> dict[str, Any]:
    """Ask one real replica, and two of them on Ray, the same in fp32."""
    model = default_model()
    with tempfile.TemporaryDirectory(prefix="lorikeet-cluster2-") as scratch:
        geometry = read_model_config(model).geometry(4)
        refs: list[AdapterRef] = []
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            folder = write_random_adapter(Path(scratch) / name, geometry, seed=seed, **options)
            refs.append(reference(name, folder, geometry))
        requests = _requests(model, refs)
        one = asyncio.run(_ask(_real_settings(model, Path(scratch) / "one", 1), refs, requests))
        two = asyncio.run(_ask(_real_settings(model, Path(scratch) / "two", 2), refs, requests))
    return token_figures(one, two)


def token_figures(one: Sequence["Answer"], two: Sequence["Answer"]) -> dict[str, Any]:
    """Compare the answers of one replica with those of two."""
    found = [
        compare(theirs.token_ids, PeerAnswer(mine.token_ids, mine.gaps)) for mine, theirs in zip(one, two, strict=True)
    ]
    requests = dict(Counter(answer.replica for answer in two))
    different = [index for index, comparison in enumerate(found) if comparison.differs]
    ties = sum(comparison.is_tie for comparison in found)
    equal = sum(comparison.equal for comparison in found)
    return {
        "different": different,
        "ties": ties,
        "tokens_compared": equal,
        "requests": requests,
        "words": f"{len(different)} of {len(found)} answers differ, {ties} ties, {equal} tokens the same; requests by "
        f"replica: {', '.join(str(count) for count in requests.values())}",
    }


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer.

    Attributes:
        token_ids: of it.
        gaps: by how much each token was the likeliest.
        replica: that gave it.
    """

    token_ids: list[int]
    gaps: list[float]
    replica: str


def _real_settings(model: Path, scratch: Path, replicas: int) -> Settings:
    scratch.mkdir()
    return Settings(
        ModelSettings(str(model), dtype="float32"),
        EngineSettings(row="lorikeet:round-robin", threads=1, max_running=REQUESTS),
        AdapterSettings(store_dir=str(scratch)),
        cluster=ClusterSettings(replicas=replicas, pool_dir=str(scratch / "pool")),
    )


def _requests(model: Path, refs: Sequence[AdapterRef]) -> list[Request]:
    """Return requests of the base and of every adapter by turns."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2)
    adapters = [None, *refs]
    requests = []
    for index in range(REQUESTS):
        text = f"{QUESTIONS[index % len(QUESTIONS)]} This is question number {index}."
        prompt = tokenizer(text)["input_ids"]
        requests.append(Request(RequestId(str(index)), prompt, sampling, 0.0, adapters[index % len(adapters)]))
    return requests


async def _ask(settings: Settings, refs: Sequence[AdapterRef], requests: Sequence[Request]) -> list[Answer]:
    """Start what the settings say, ask everything at once, and return the answers."""
    async with AsyncExitStack() as stack:
        client = EngineClient(settings) if settings.cluster.replicas == 1 else open_cluster(settings, stack)
        try:
            await client.start(lambda progress: None)
            client.know_adapters(refs)
            return list(await asyncio.gather(*(_read(client.submit(request)) for request in requests)))
        finally:
            await client.close()


async def _read(handle: RequestHandle) -> Answer:
    gaps: list[float] = []
    async for output in handle:
        for token in output.tokens:
            first, second = (logprob for _, logprob in (token.top or ())[:2])
            gaps.append(first - second)
    if len(handle.token_ids) != TOKENS or any(math.isnan(gap) for gap in gaps):
        raise RuntimeError(f"request {handle.request.request_id} has {len(handle.token_ids)} tokens of {TOKENS}")
    return Answer(list(handle.token_ids), gaps, str(handle.replica))
