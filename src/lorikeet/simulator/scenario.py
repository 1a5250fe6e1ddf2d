"""Reads scenarios to simulate as plain values, from a file, from flags, or from both."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.cluster.adapters.copy_times import FetchForm
from lorikeet.config import ConfigError, Count, EngineSettings, ModelSettings, Positive, Settings, convert
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.request import Slo
from lorikeet.workloads.arrivals import Rates
from lorikeet.workloads.recipe import Recipe, without_effect
from lorikeet.workloads.synthetic import (
    ATTENTION,
    adapter_names,
    adapters_by_name,
    parse_modules,
    parse_ranks,
    spread,
)
from lorikeet.workloads.workload import Range, WorkloadError, WorkloadRequest, parse_slo, read_any

_WITHOUT_EFFECT = frozenset(
    {"executor", "profile", "tensor_parallel", "pipeline_parallel", "rank_address", "rank_key_file"}
    | {"device", "kernels", "enforce_eager", "threads"}
)
"""Settings of a real engine. A modelled engine gets these values from its profile."""


class ScenarioError(ValueError):
    """The scenario cannot be read or is invalid. The message names the file and the key."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the settings of one simulation.

    Attributes:
        profile: name or file of the cost profile.
        preset: name of the preset.
        replicas: number of equal engines. With several engines, the preset's placement and routing apply.
        cells: number of equal cells into which the replicas are cut. Each cell has a separate router and orchestrator,
            and is simulated in a separate process.
        fetch: form of adapter copies between replicas: ``pipelined`` or ``store-and-forward``.
        provisioned: whether adapters start at the replicas of the first placement. If not, each adapter is read from
            its source files for its first request.
        trace: workload, Azure's CSV or Mooncake's JSONL to start from; empty to generate requests.
        shape, arrivals, cv, count, duration_s, adapter_choice, length_scale, block_size, most_tokens: as in
            :class:`Recipe`.
        rate: requests per second, or points ``0:2,400:8``; empty for the trace's rate, or 1 without a trace. A file may
            have a number here, and for ``ranks``, ``prompt_tokens`` and ``output_tokens``.
        adapters: number of adapters without files, in addition to the adapters of ``trace``.
        ranks: ranks that adapters get in turn, such as ``8-128``. Adapters of a trace get them in the order of their
            names.
        modules: target modules of the adapters. Host cores assist only adapters of q, k and v.
        prompt_tokens, output_tokens: lengths of generated requests, as numbers or ranges.
        max_model_len: number of tokens of the longest sequence; 0 for the profile's value.
        engine: engine settings that differ from their defaults. ``num_scheduler_steps`` is 1 by default. The preset is
            ``preset``. Values that the profile determines (device, kernels, threads, ranks) cannot be set.
        slo: limits such as ``ttft=0.5,tpot=0.1``.
        predictor: predictor of answer lengths, for policies that use them: ``oracle:0.8`` is right four times in five,
            ``history`` learns from finished answers, ``none`` uses the true lengths.
        seed: seed of all random draws.
    """

    profile: str
    preset: str = "auto"
    replicas: Positive = 1
    cells: Positive = 1
    fetch: FetchForm = FetchForm.PIPELINED
    provisioned: bool = True
    trace: str = ""
    shape: str = "plain"
    arrivals: str = "poisson"
    rate: str = ""
    cv: float = 1.0
    count: Positive | None = None
    duration_s: float | None = None
    adapters: Count = 0
    ranks: str = "8-128"
    modules: str = ",".join(ATTENTION)
    adapter_choice: str = "uniform"
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    length_scale: float = 1.0
    block_size: Count = 0
    most_tokens: Positive | None = None
    max_model_len: Count = 0
    engine: dict[str, Any] = {}
    slo: str = ""
    predictor: str = "none"
    seed: int = 0

    def settings(self) -> Settings:
        """Return the settings of the engine.

        Raises:
            ScenarioError: a setting is unknown, invalid, or has no effect on a simulation.
        """
        if "preset" in self.engine:
            raise ScenarioError("engine.preset: set the preset of the scenario instead")
        if useless := sorted(_WITHOUT_EFFECT & self.engine.keys()):
            raise ScenarioError(f"engine.{useless[0]}: has no effect in a simulation, where the profile determines it")
        given = {"num_scheduler_steps": 1, **self.engine, "preset": self.preset}
        try:
            engine = convert(given, EngineSettings, "engine")
        except ConfigError as error:
            raise ScenarioError(str(error)) from error
        return Settings(ModelSettings(max_model_len=self.max_model_len), engine)

    def recipe(self, rate: float | None = None) -> Recipe:
        """Return the recipe of the workload; ``rate`` replaces the scenario's rate.

        Raises:
            ScenarioError: a value is invalid.
            WorkloadError: the trace cannot be read.
        """
        self._check_together()
        rate_text = self.rate or ("" if self.trace or self.arrivals == "now" else "1")
        try:
            ranks = parse_ranks(self.ranks)
            rates = Rates.constant(rate) if rate is not None else Rates.parse(rate_text) if rate_text else None
            return Recipe(
                trace=tuple(read_any(Path(self.trace))) if self.trace else (),
                shape=self.shape,
                arrivals=self.arrivals,
                rates=rates,
                variation=self.cv,
                count=self.count,
                duration_s=self.duration_s,
                adapters=tuple(adapter_names(self.adapters)),
                ranks=tuple(spread(ranks, self.adapters)) if self.adapters else None,
                adapter_choice=self.adapter_choice,
                prompt_tokens=Range.parse(self.prompt_tokens),
                output_tokens=Range.parse(self.output_tokens),
                length_scale=self.length_scale,
                block_size=self.block_size,
                most_tokens=self.most_tokens,
                seed=self.seed,
            )
        except OSError as error:
            raise ScenarioError(f"trace: {error}") from error
        except WorkloadError:
            raise
        except ValueError as error:
            raise ScenarioError(str(error)) from error

    def adapter_refs(self, geometry: ModelGeometry, workload: Sequence[WorkloadRequest]) -> dict[str, AdapterRef]:
        """Return the adapters by name: generated adapters, and adapters that the workload names.

        Raises:
            ScenarioError: unknown target module.
        """
        named = sorted({request.adapter for request in workload if request.adapter is not None})
        names = tuple(dict.fromkeys((*adapter_names(self.adapters), *named)))
        return adapters_by_name(names, parse_ranks(self.ranks), geometry, modules=self.module_names())

    def module_names(self) -> tuple[str, ...]:
        """Return the target modules of the adapters.

        Raises:
            ScenarioError: a module is unknown, or is named twice.
        """
        try:
            return parse_modules(self.modules)
        except ValueError as error:
            raise ScenarioError(str(error)) from error

    def limits(self) -> Slo:
        """Return the SLO.

        Raises:
            OptionError: the SLO cannot be read.
        """
        return parse_slo(self.slo)

    def _check_together(self) -> None:
        """Check that every given value has an effect.

        Raises:
            ScenarioError: a value has no effect.
        """
        given = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        useless = without_effect(given, self.shape, self.arrivals, has_trace=bool(self.trace))
        if useless is not None:
            raise ScenarioError(": ".join(useless))
        for name in ("fetch", "provisioned"):
            if name in given and self.replicas == 1:
                raise ScenarioError(f"{name}: has no effect with one replica")
        if self.replicas % self.cells:
            raise ScenarioError(f"cells: {self.replicas} replicas cannot be cut into {self.cells} equal cells")
        if self.arrivals == "now" and self.rate:
            raise ScenarioError(f"rate {self.rate!r}: arrivals 'now' have no rate")


_NUMBERS = {"rate", "ranks", "prompt_tokens", "output_tokens"}
"""Names of text values that may be written as a number."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Scenario)}


def make_scenario(file: Path | None, flags: Mapping[str, Any]) -> Scenario:
    """Build a scenario from a TOML file and flags. Flags take precedence. Flags that are None are not set.

    Raises:
        ScenarioError: the file cannot be read, a key is unknown, or a value is wrong.
    """
    tables: dict[str, Any] = {}
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ScenarioError(f"{file}: {error}") from error
    given = {name: value for name, value in flags.items() if value is not None}
    if tables.get("engine") and "engine" in given:
        given["engine"] = {**tables["engine"], **given["engine"]}
    tables |= {name: str(tables[name]) for name in _NUMBERS & tables.keys() if type(tables[name]) in (int, float)}
    if "profile" not in tables | given:
        raise ScenarioError("give --profile NAME, or `profile` in the scenario file; `lorikeet profiles` lists them")
    try:
        return msgspec.convert({**tables, **given}, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{file or 'scenario'}: {error}") from error
