"""What is simulated, as plain values: from a file, from flags, or both."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.bench.choices import Range, parse_slo
from lorikeet.bench.lengths import scaled_block_tokens
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import adapter_names, parse_ranks, spread, synthetic_adapters
from lorikeet.bench.workload import MOONCAKE_BLOCK_TOKENS, read_any
from lorikeet.cluster.fetch_times import FetchForm
from lorikeet.config import EngineSettings, ModelSettings, Positive, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.slo import Slo

_MADE_BLOCK_TOKENS = 32
"""Of prefix blocks that are not from a trace."""


class ScenarioError(ValueError):
    """A scenario cannot be read or has no meaning; the message names file and key."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation.

    Attributes:
        profile: name or file of the profile.
        preset: the system, a row's name.
        replicas: engines, all alike; with several, the row's placement and routing count.
        fetch: how adapters come from one replica to another: ``pipelined`` or ``store-and-forward``.
        provisioned: at the start adapters are where the first placement has them; else each is read from its files when
            it is first asked for.
        trace: workload, Azure's CSV or Mooncake's JSONL to begin with; empty to make requests.
        shape, arrivals, cv, count, duration_s, adapter_choice, length_scale, block_tokens, most_tokens: as in
            :class:`Recipe`.
        rate: requests per second, or points ``0:2,400:8``; empty for the trace's own, or 1.
        adapters: how many there are, without files.
        ranks: of the adapters in turn, such as ``8-128``.
        prompt_tokens, output_tokens: numbers or ranges, of requests that are made.
        max_model_tokens: longest sequence; 0 for the profile's.
        engine: engine settings other than their defaults. ``max_repeat`` is 1 here if it is not given.
        slo: limits such as ``ttft=0.5,tpot=0.1``.
        predictor: of the lengths of answers, for policies that look at them: ``oracle:0.8`` is right four times in
            five, ``history`` learns from the answers as they end, ``none`` leaves them the true lengths.
        seed: of all that is drawn.
    """

    profile: str
    preset: str = "auto"
    replicas: Positive = 1
    fetch: FetchForm = FetchForm.PIPELINED
    provisioned: bool = True
    trace: str = ""
    shape: str = "plain"
    arrivals: str = "poisson"
    rate: str = ""
    cv: float = 1.0
    count: int | None = None
    duration_s: float | None = None
    adapters: int = 0
    ranks: str = "8-128"
    adapter_choice: str = "uniform"
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    length_scale: float = 1.0
    block_tokens: int = 0
    most_tokens: int | None = None
    max_model_tokens: int = 0
    engine: dict[str, Any] = {}
    slo: str = ""
    predictor: str = "none"
    seed: int = 0

    def settings(self) -> Settings:
        """Return the settings of the engine.

        Raises:
            ScenarioError: one is unknown or wrong.
        """
        given = {"max_repeat": 1, **self.engine, "row": self.preset}
        try:
            engine = msgspec.convert(given, EngineSettings, strict=False)
        except msgspec.ValidationError as error:
            raise ScenarioError(f"engine: {error}") from error
        return Settings(ModelSettings(max_model_tokens=self.max_model_tokens), engine)

    def recipe(self, rate: float | None = None) -> Recipe:
        """Return what the workload is made of; ``rate`` takes the place of the scenario's own.

        Raises:
            ScenarioError: a value has no meaning.
            WorkloadError: the trace cannot be read.
        """
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
                block_tokens=self._unscaled_block_tokens(),
                most_tokens=self.most_tokens,
                seed=self.seed,
            )
        except OSError as error:
            raise ScenarioError(f"trace: {error}") from error
        except ValueError as error:
            raise ScenarioError(str(error)) from error

    def prefix_block_tokens(self) -> int:
        """Return the length of a prefix block in the requests of the recipe.

        Raises:
            ChoiceError: scaling does not leave a whole number.
        """
        tokens = self._unscaled_block_tokens()
        return scaled_block_tokens(tokens, self.length_scale) if self.trace and self.shape == "chat" else tokens

    def adapter_refs(self, geometry: ModelGeometry) -> dict[str, AdapterRef]:
        """Return the adapters by name."""
        return {ref.name: ref for ref in synthetic_adapters(self.adapters, parse_ranks(self.ranks), geometry)}

    def limits(self) -> Slo:
        """Return the SLO.

        Raises:
            ChoiceError: it cannot be read.
        """
        return parse_slo(self.slo)

    def _unscaled_block_tokens(self) -> int:
        return self.block_tokens or (MOONCAKE_BLOCK_TOKENS if self.trace else _MADE_BLOCK_TOKENS)


def make_scenario(file: Path | None, flags: Mapping[str, Any]) -> Scenario:
    """Merge a TOML file and flags; flags win, and those of None count as not given.

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
    try:
        return msgspec.convert({**tables, **given}, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{file or 'scenario'}: {error}") from error
