"""Runs a recipe against a server: single runs, and the search for its peak rate.

Each run also reads the server's counters from ``/metrics``, before and after.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from lorikeet.bench.load_client import LoadTarget, drive
from lorikeet.bench.load_report import LoadFigures, RequestResult, summarise
from lorikeet.bench.peak import LEAST_PROBE_REQUESTS, Peak, find_peak, min_probe_s
from lorikeet.core.request import Slo
from lorikeet.workloads.arrivals import Rates
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.workload import OptionError, Range, WorkloadRequest, block_tokens_of

ShowProgress = Callable[[str, int, int], None]
"""Called with a stage, the amount done, and the total."""

_LEAST_PROBE_S = 30.0
_UNSERVED = 2.0
"""Ratio of offered to answered requests above which a server that misses no limit is assumed to meet its limits at any
rate."""
_LATE_SHARE = 0.1
_BUSY_SHARE = 0.8
"""Limits of client lateness, as a share of the median TTFT, and of the CPU load, as a share of a core."""


class LoadRun(NamedTuple):
    """One measurement.

    Attributes:
        rate: planned requests per second; None for the times of the workload, or for all at time 0.
        figures: the summary.
        cpu_share: share of a core that the client used; see ``LoadDriveResult``.
        server: changes of the server's counters, by name.
        exchanges: records of the requests.
    """

    rate: float | None
    figures: LoadFigures
    cpu_share: float
    server: dict[str, float]
    exchanges: list[RequestResult]

    @property
    def is_client_bound(self) -> bool:
        """Return whether the client was so late or so busy that it may have limited the figures."""
        late_s = self.figures.lateness_s
        ttft_s = self.figures.ttft_s
        if ttft_s is None:
            return False
        return self.cpu_share > _BUSY_SHARE or (late_s is not None and late_s.p99 > _LATE_SHARE * ttft_s.p50)


class LoadRunner:
    """Runs a recipe against a server. Every run sends new requests and new prompts.

    Args:
        target: the server.
        recipe: the workload to send; each run replaces count and rate, and draws again.
        slo: limits of requests that have no limits.
        concurrency: largest number of requests in flight; 0 for no limit.
        ids: token ids from which prompts are made.
        show: called with progress.
    """

    def __init__(
        self,
        target: LoadTarget,
        recipe: Recipe,
        slo: Slo,
        *,
        concurrency: int = 0,
        ids: Range = DEFAULT_IDS,
        show: ShowProgress = lambda stage, done, total: None,
    ) -> None:
        self._target = target
        self._recipe = recipe
        self._slo = slo
        self._concurrency = concurrency
        self._ids = ids
        self._show = show
        self._runs = 0

    def warm_up(self, count: int) -> RequestResult | None:
        """Send ``count`` requests to the base model, one after the other.

        Return the first failure; None if there is none.
        """
        if not count:
            return None
        lengths = self._requests(1, None)[0]
        requests = [WorkloadRequest(0.0, None, lengths.input_tokens, lengths.output_tokens)] * count
        failed = [exchange for exchange in self._drive(requests, "warm-up", 1).exchanges if exchange.error is not None]
        return failed[0] if failed else None

    def run(self, count: int, rate: float | None, stage: str = "requests") -> LoadRun:
        """Measure ``count`` requests at ``rate`` per second; None for the times of the workload, or for all at time 0.

        Raises:
            OptionError: a rule of the recipe is invalid for these requests.
        """
        requests = self._requests(count, rate)
        before = read_counters(self._target.url, self._target.api_key)
        began_s = time.perf_counter()
        run = self._drive(requests, stage, self._concurrency)
        after = read_counters(self._target.url, self._target.api_key)
        ended_s = time.perf_counter()
        return run._replace(rate=rate, server=growth(before, after, ended_s - began_s))

    @property
    def min_probe_s(self) -> float:
        """Return the necessary length of a search's probes, from the longest limit of the requests."""
        own = {request.slo for request in self._recipe.trace if request.slo is not None}
        return max(_LEAST_PROBE_S, *(min_probe_s(slo) for slo in (self._slo, *own)))

    def find_peak(self, attainment: float, start: float, probe_s: float) -> tuple[Peak, list[LoadRun]]:
        """Search for the highest rate at which the share ``attainment`` of requests meets the SLO.

        If the recipe has a trace, rates at which the trace has too few requests for a probe are not tried. A shorter
        probe would end before the queues reach their full length.

        Args:
            attainment: share of the requests that must meet the SLO.
            start: first rate.
            probe_s: length of a probe, see :attr:`min_probe_s`; longer if fewer than ten requests would arrive.

        Raises:
            OptionError: no limit is given, or no limit that an overload breaks; a rule of the recipe is invalid for
                this number of requests, or its trace has too few requests for the first probe; or the first rate is too
                low for a probe.
        """
        runs: list[LoadRun] = []
        trace_requests = len(self._recipe.trace) or inf
        highest = trace_requests / probe_s
        if start > highest or trace_requests < LEAST_PROBE_REQUESTS:
            count = max(LEAST_PROBE_REQUESTS, round(start * probe_s))
            raise OptionError(
                f"a probe of {probe_s:g} s at {start:.3g} requests/s needs {count} requests, and the workload has "
                f"{trace_requests}: start at a lower rate, or use shorter probes"
            )

        if not 1 / probe_s <= start < inf:
            raise OptionError(
                f"a search must start at a rate of at least {1 / probe_s:.3g}, one request per probe, not at {start:g}"
            )

        def probe(rate: float) -> float:
            count = max(LEAST_PROBE_REQUESTS, round(rate * probe_s))
            runs.append(self.run(count, rate, f"probe at {rate:.3g}/s"))
            attained = runs[-1].figures.slo_attainment
            if attained is None:
                raise OptionError("the requests have no SLO to meet")
            answered = runs[-1].figures.request_rate
            took_s = runs[-1].figures.duration_s
            if attained >= attainment and answered * _UNSERVED < rate and took_s > _LEAST_PROBE_S:
                raise OptionError(
                    f"at {rate:.3g} requests/s the server answers {answered:.3g} and meets the SLO, which thus cannot "
                    "show an overload: add a limit on ttft or e2e"
                )
            return attained

        return find_peak(probe, attainment, start, lowest=1 / probe_s, highest=highest), runs

    def _requests(self, count: int, rate: float | None) -> list[WorkloadRequest]:
        rates = None if rate is None else Rates.constant(rate)
        return msgspec.structs.replace(self._recipe, count=count, rates=rates, run=self._runs).requests()

    def _drive(self, requests: list[WorkloadRequest], stage: str, concurrency: int) -> LoadRun:
        prompts = Prompts(self._recipe.seed, self._runs, self._ids, block_tokens_of(requests))
        self._runs += 1
        done = 0

        def count(exchange: RequestResult) -> None:
            nonlocal done
            done += 1
            self._show(stage, done, len(requests))

        self._show(stage, 0, len(requests))
        exchanges, cpu_share = drive(requests, self._target, prompts, concurrency, count)
        return LoadRun(None, summarise(exchanges, self._slo), cpu_share, {}, exchanges)


COUNTS = {
    "vllm:lora_adapter_load_seconds_count": "adapter loads",
    "lorikeet:request_adapter_wait_seconds_count": "requests that waited for an adapter",
    "vllm:num_preemptions_total": "preemptions",
    "lorikeet:engine_restarts_total": "engine restarts",
}
MEANS = {
    "vllm:lora_adapter_load_seconds": "mean adapter load, s",
    "lorikeet:request_adapter_wait_seconds": "mean wait for an adapter, s",
    "vllm:time_to_first_token_seconds": "mean TTFT inside the server, s",
}
SHARES = {"lorikeet:predictor_cpu_seconds_total": "length predictor, share of a core"}
"""Samples and histograms to read if they exist, with their names in a report. Samples of shares are seconds."""

_WANTED = {*COUNTS, *(f"{name}_{end}" for name in MEANS for end in ("count", "sum")), *SHARES}


def parse_counters(page: str) -> dict[str, float]:
    """Return the wanted samples of a metrics page, each summed over its labels.

    Raises:
        ValueError: the page is malformed.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in _WANTED:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def read_counters(url: str, api_key: str = "") -> dict[str, float]:
    """Read the counters of a server. The result is empty if the server has no metrics page."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return parse_counters(asyncio.run(_page(f"{url.rstrip('/')}/metrics", headers)))
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}


async def _page(url: str, headers: Mapping[str, str]) -> str:
    """Return the text at ``url``; empty if the request is refused."""
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=True) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        return await response.text() if response.status == 200 else ""


def growth(before: Mapping[str, float], after: Mapping[str, float], passed_s: float) -> dict[str, float]:
    """Return the changes between two readings, ``passed_s`` apart, under readable names.

    A counter that is missing in the first reading counts as 0. Means without a value between the readings are left out.
    """
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    counts = {text: grown[name] for name, text in COUNTS.items() if name in grown}
    means = {
        text: grown[f"{name}_sum"] / grown[f"{name}_count"]
        for name, text in MEANS.items()
        if grown.get(f"{name}_count")
    }
    shares = {text: grown[name] / passed_s for name, text in SHARES.items() if name in grown}
    return counts | means | shares
