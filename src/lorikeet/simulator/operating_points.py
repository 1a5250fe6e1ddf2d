"""Searches operating points, the highest load that a replica serves under an SLO, rank by rank on a virtual clock.

Source: LoRAServe, section IV-A, for the idea. The paper does not describe a search, so the search is ours.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from lorikeet.bench.load_report import slo_attainment
from lorikeet.bench.peak import find_peak, probe_requests
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.setup import OUTPUT_TOKENS, PROMPT_TOKENS
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.request import Slo
from lorikeet.costs.profile import CostProfile, OperatingLoads
from lorikeet.presets import for_one_replica, resolve_preset
from lorikeet.simulator.run import simulate
from lorikeet.workloads.arrivals import Rates
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.synthetic import PAPER_RANKS, synthetic_adapters
from lorikeet.workloads.workload import Range

ATTAINMENT = 0.95
"""Share of requests that must meet the SLO. With a limit on TTFT alone, this means its 95th percentile."""

_LEFT_OUT = 0.1
"""Share of a run's first requests that are not counted, because the replica is not busy yet."""
_FIRST_RATE = 1.0
_LOWEST_RATE = 2.0**-10
"""Requests per second at which a search begins, and below which a rate does not count as a load."""
_MOST_PROBES = 24

Show = Callable[[str, int, int], None]


class OperatingPointError(ValueError):
    """No operating point was found. The message names the rank and the reason."""


class MeanTokens(NamedTuple):
    """Holds the number of prompt and answer tokens of every request."""

    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS


class OperatingPointSearch(msgspec.Struct, frozen=True):
    """The options of a search for operating points.

    Attributes:
        ranks: ranks to search.
        adapters: number of adapters, all of one rank, requested at random.
        requests: smallest number of requests in a probe.
        limits: see ``probe_requests``. An overload of less than one part in ``limits`` goes unnoticed.
        precision: largest distance of the met and the missed rate, relative to the met one.
    """

    ranks: tuple[int, ...] = PAPER_RANKS
    adapters: int = 25
    requests: int = 3000
    limits: float = 30.0
    precision: float = 0.02


THOROUGH = OperatingPointSearch()
BRIEF = OperatingPointSearch(requests=1000, limits=10.0, precision=0.05)
"""Options of a less precise search, for simulations whose profile lacks matching operating points."""

_found: dict[bytes, OperatingLoads] = {}
"""Results of :func:`operating_points_for` in this process."""


def operating_points_for(
    profile: CostProfile,
    preset: str,
    slo: Slo,
    lengths: tuple[int, int],
    seed: int,
    *,
    engine: EngineSettings | None = None,
    search: OperatingPointSearch = BRIEF,
    show: Show = lambda stage, done, total: None,
) -> OperatingPoints:
    """Return the profile's operating points for exactly this setting, or search them once per process.

    Args:
        profile: profile of the replica.
        preset: name of the preset, of which only the options of a single replica count.
        slo: SLO to meet.
        lengths: prompt and answer of every request, tokens.
        seed: seed of the requests.
        engine: settings of the replica, whose preset is ignored. None for the defaults with a plan for each step.
        search: options of the search.
        show: called with (stage, requests that have ended, requests) during a search.

    Raises:
        OperatingPointError: no operating point exists.
        ConfigError: preset or settings do not fit the profile.
        ProfileError: the profile lacks a constant.
    """
    replica = msgspec.structs.replace(engine or EngineSettings(num_scheduler_steps=1), preset=preset)
    _, resolved = resolve_preset(preset)
    wanted = (resolved.kernel_form, slo, *lengths, replica.max_num_seqs, replica.max_num_batched_tokens)
    for loads in profile.operating_points:
        if _setting(loads) == wanted:
            return OperatingPoints(loads.tokens_per_s)
    settings = msgspec.structs.replace(replica, preset="")
    key = msgspec.json.encode((profile, settings, for_one_replica(resolved), slo, lengths, seed, search))
    if key not in _found:
        _found[key] = find_operating_loads(profile, replica, slo, lengths, seed, search, show)
    return OperatingPoints(_found[key].tokens_per_s)


def find_operating_loads(
    profile: CostProfile,
    engine: EngineSettings,
    slo: Slo,
    lengths: tuple[int, int],
    seed: int = 0,
    search: OperatingPointSearch = THOROUGH,
    show: Show = lambda stage, done, total: None,
) -> OperatingLoads:
    """Search, for each rank, the highest rate of Poisson arrivals at which enough requests meet the SLO.

    All probes of a rank begin with the same requests, closer together or further apart. A load is the rate times the
    tokens of a request, so it is an offered load, like demand.

    Args:
        profile: profile of the replica.
        engine: settings. With ``num_scheduler_steps`` 1, the engine decides after each step, and the simulation is
            faster.
        slo: SLO to meet.
        lengths: prompt and answer of every request, tokens.
        seed: seed of the requests.
        search: precision and size of the search.
        show: called with (stage, requests of a probe that have ended, requests).

    Raises:
        OperatingPointError: the SLO has no limits, the requests are longer than the model allows, or for some rank they
            miss the SLO at every rate, or meet it at every rate.
        ConfigError: a setting does not fit the profile.
        ProfileError: the profile lacks a constant.
    """
    if slo == Slo():
        raise OperatingPointError("operating points need limits, such as ttft=10 or ttft=2,tpot=0.1 (seconds)")
    if sum(lengths) > profile.max_model_len:
        raise OperatingPointError(f"requests of {lengths[0]} + {lengths[1]} tokens are too long for {profile.name}")
    name, preset = resolve_preset(engine.preset)
    rates: dict[int, float] = {}
    for rank in sorted(search.ranks):
        start = min(rates.values(), default=_FIRST_RATE)  # A larger rank is rarely faster.
        rates[rank] = _peak(_Probe(profile, engine, slo, MeanTokens(*lengths), seed, search, rank, show), start)
    return OperatingLoads(
        kernel_form=preset.kernel_form,
        slo=slo,
        prompt_tokens=lengths[0],
        output_tokens=lengths[1],
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        tokens_per_s={rank: rate * sum(lengths) for rank, rate in rates.items()},
        source=f"simulated: {name}, {search.adapters} adapters of each rank, {search.requests} requests or more, "
        f"{ATTAINMENT:.0%} within the SLO",
    )


def search_host_bytes(geometry: ModelGeometry, search: OperatingPointSearch) -> int:
    """Return the host memory that holds all adapters of a search twice, because KV may take half of it."""
    (largest,) = synthetic_adapters(1, (max(search.ranks),), geometry)
    return 2 * search.adapters * largest.weight_bytes


def with_operating_loads(profile: CostProfile, loads: OperatingLoads) -> CostProfile:
    """Return the profile with these operating points, which replace earlier ones of the same setting."""
    others = tuple(each for each in profile.operating_points if _setting(each) != _setting(loads))
    return msgspec.structs.replace(profile, operating_points=(*others, loads))


def _setting(loads: OperatingLoads) -> tuple[object, ...]:
    """Return all inputs, besides the profile, on which operating points depend."""
    return (
        loads.kernel_form,
        loads.slo,
        loads.prompt_tokens,
        loads.output_tokens,
        loads.max_num_seqs,
        loads.max_num_batched_tokens,
    )


class _Probe(NamedTuple):
    """Runs probes at any rate with adapters of one rank; see :func:`find_operating_loads`."""

    profile: CostProfile
    engine: EngineSettings
    slo: Slo
    lengths: MeanTokens
    seed: int
    search: OperatingPointSearch
    rank: int
    show: Show

    def attainment(self, rate: float) -> float:
        """Return the share of the requests of a run at ``rate`` that meet the SLO."""
        requests = probe_requests(rate, self.slo, self.search.requests, self.search.limits)
        refs = synthetic_adapters(self.search.adapters, (self.rank,), self.profile.geometry)
        adapters: dict[str, AdapterRef] = {ref.name: ref for ref in refs}
        recipe = Recipe(
            rates=Rates.constant(rate),
            count=requests,
            adapters=tuple(adapters),
            prompt_tokens=Range(self.lengths.prompt_tokens, self.lengths.prompt_tokens),
            output_tokens=Range(self.lengths.output_tokens, self.lengths.output_tokens),
            seed=self.seed,
        )
        stage = f"operating point of rank {self.rank}"
        simulated = simulate(
            Settings(engine=self.engine),
            self.profile,
            recipe.requests(),
            adapters,
            Prompts(self.seed),
            on_finished=lambda done: self.show(stage, done, requests),
        )
        share = slo_attainment(simulated.run.exchanges[int(requests * _LEFT_OUT) :], self.slo)
        assert share is not None  # The SLO has limits.
        return share


def _peak(probe: _Probe, start: float) -> float:
    """Return the highest request rate, per second, that meets the SLO."""
    peak = find_peak(
        probe.attainment,
        ATTAINMENT,
        start,
        lowest=_LOWEST_RATE,
        precision=probe.search.precision,
        max_probes=_MOST_PROBES,
    )
    if peak.rate is None:
        raise OperatingPointError(f"rank {probe.rank}: even {peak.missed_rate:.3g} requests/s miss the SLO")
    if peak.missed_rate is None:
        raise OperatingPointError(f"rank {probe.rank}: requests meet the SLO at any rate")
    return peak.rate
