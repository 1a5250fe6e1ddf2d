"""Holds the inputs of routing and placement policies: preset, profile, options, and values derived from them."""

from dataclasses import dataclass

import msgspec

from lorikeet.cluster.placement.operating_points import EstimatedPoints, OperatingPoints, Points
from lorikeet.config import ConfigError
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.core.request import Slo
from lorikeet.core.text import install_command
from lorikeet.costs.profile import CostProfile, OperatingLoads
from lorikeet.costs.replica_estimates import profile_costs
from lorikeet.presets import Preset

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
"""Lengths of a mean request by default, from LoRAServe's motivation."""

GENERIC = ReplicaCosts(0.008, 1e-4, 1e-4, 5e-4, 5e-7, 2e-6, 1e-4, 25e9)
"""Rough costs of a model of 8 billion parameters on an A100, for replicas without known costs."""
GENERIC_MEMORY_BYTES = 50 * 2**30
"""Memory that an A100 has left beside the weights of such a model, in bytes."""
GENERIC_TOKEN_BYTES = 2**17
"""Bytes of one token's KV in such a model."""


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the options of policies besides preset and profile.

    All options are plain values, which can be sent to other processes.

    Attributes:
        seed: seed of all random draws.
        ttft_s, tpot_s, e2e_s: targets of the SLO in seconds; 0 for no limit. `lorikeet serve` has no E2E target.
        memory_bytes: memory of each replica for adapters and KV, over all ranks; 0 for the profile's value.
        kv_token_bytes: bytes of one token's KV, over all ranks; 0 for the profile's value.
        link_bytes_per_s: speed of a declared link (``engine.link_bytes_per_s``); 0 for the profile's.
        prompt_tokens, output_tokens: lengths of a mean request.
        tokens_per_s: operating points by rank; empty for the profile's values.
        costs: costs of a replica without a profile.
        max_batch: largest number of sequences in a step.
        has_default_slo: whether a missing target defaults to ``UNLOADED_TIMES`` times the value of an unloaded replica.
            If not, a missing target means no limit.
    """

    seed: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    memory_bytes: int = 0
    kv_token_bytes: float = 0.0
    link_bytes_per_s: float = 0.0
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    tokens_per_s: dict[int, float] = {}
    costs: ReplicaCosts = GENERIC
    max_batch: int = 64
    has_default_slo: bool = False

    @property
    def slo(self) -> Slo:
        """The SLO in the form of requests."""
        return Slo(self.ttft_s or None, self.tpot_s or None, self.e2e_s or None)


@dataclass(frozen=True)
class PolicySetup:
    """Holds the facts about a cluster from which its policies are built.

    Expensive facts are computed at their first use.

    Attributes:
        preset: preset of all replicas.
        profile: profile of one replica; None if there is none.
        options: options of the cluster.
    """

    preset: Preset
    profile: CostProfile | None
    options: ClusterOptions

    def costs(self) -> ReplicaCosts:
        """Return the costs of a replica, from the profile if there is one."""
        if self.profile is None:
            return self.options.costs
        return profile_costs(self.profile, self.preset.kernel_form, self.options.link_bytes_per_s)

    def points(self) -> Points:
        """Return the operating points of a replica.

        Searched points are used if there are any, otherwise estimates from the costs.

        Points in the options take precedence over the profile's.

        Raises:
            ConfigError: they cannot be used, or SciPy is not installed.
        """
        options = self.options
        tokens_per_s = options.tokens_per_s
        if not tokens_per_s and self.profile is not None:
            lengths = options.prompt_tokens, options.output_tokens
            loads = loads_that_fit(self.profile, self.preset.kernel_form, options.slo, *lengths)
            tokens_per_s = {} if loads is None else loads.tokens_per_s
        if not tokens_per_s:
            return EstimatedPoints(
                self.costs(), options.prompt_tokens, options.output_tokens, options.max_batch, options.tpot_s
            )
        try:
            return OperatingPoints(tokens_per_s)
        except ValueError as error:
            raise ConfigError(f"operating points: {error}") from error
        except ModuleNotFoundError as error:
            raise ConfigError(f"operating points need {error.name}: run `{install_command('cluster')}`") from error


def loads_that_fit(
    profile: CostProfile, form: KernelForm, slo: Slo, prompt_tokens: int, output_tokens: int
) -> OperatingLoads | None:
    """Return the operating points of a kernel form and an SLO; None if the profile has none.

    If the profile has several, the points whose requests are nearest in length are returned.
    """

    def apart(loads: OperatingLoads) -> int:
        return abs(loads.prompt_tokens - prompt_tokens) + abs(loads.output_tokens - output_tokens)

    fitting = [loads for loads in profile.operating_points if (loads.kernel_form, loads.slo) == (form, slo)]
    return min(fitting, key=apart, default=None)
