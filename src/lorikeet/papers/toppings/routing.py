"""Implements rank-aware scheduling (TOPPINGS, section 5, Algorithm 1)."""

from math import inf
from typing import Any, NamedTuple, Self

import msgspec

from lorikeet.cluster.routing.base import (
    AdapterPlaces,
    Choice,
    RoutingPolicy,
    least,
    with_capacity,
)
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup
from lorikeet.config import ConfigError
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.replica_estimates import UNLOADED_TIMES
from lorikeet.papers.toppings.performance import PerformanceModel, models_of_costs, performance_models


class ToppingsCosts(NamedTuple):
    """Holds the cost of a request by replica.

    Attributes:
        breaks_slo: whether a decode step with the request would exceed the SLO (the paper's infinite cost).
        cost: seconds that the request adds to each token of each request. Its prefill is spread over the tokens of an
            answer.
        requests: number of requests at the replica.
        total: cost for all requests of the replica together.
    """

    breaks_slo: Flags
    cost: Numbers
    requests: Numbers
    total: Numbers


class Toppings(RoutingPolicy):
    """Chooses the replica where a request slows the others least, among replicas that keep the SLO with the request.

    The order is (breaks the SLO, total, cost, requests, index). A flag replaces the paper's infinity, because an idle
    replica would multiply infinity by 0. Candidates have free memory for the request. If no candidate exists, the
    request waits.

    Args:
        prefill: model of the step that prefills all queued requests (PrePerf).
        decode: model of the step that decodes all requests (DecPerf).
        slo_s: longest decode step; 0 for ``UNLOADED_TIMES`` the shortest.
        safety: divides ``slo_s``, because prefills between decodes are not in the model; 1 is the paper.
        prompt_tokens: length of a mean request's prompt, for models that are fitted again.
        empty_is_free: whether an empty prefill takes no time. If not, it takes its fixed part.
    """

    def __init__(
        self,
        prefill: PerformanceModel,
        decode: PerformanceModel,
        slo_s: float = inf,
        safety: float = 1.0,
        prompt_tokens: int = 512,
        *,
        empty_is_free: bool = False,
    ) -> None:
        self._given_slo_s = slo_s / safety
        self._prompt_tokens = prompt_tokens
        self._empty_is_free = empty_is_free
        self._set(prefill, decode)

    @classmethod
    def build(
        cls,
        setup: PolicySetup,
        step_models: tuple[PerformanceModel, PerformanceModel] | None = None,
        **parameters: Any,
    ) -> Self:
        """Create the policy with models that are fitted to the profile's steps.

        Without a profile, the models are fitted to the replica's costs.

        Args:
            setup: the facts about the cluster.
            step_models: PrePerf and DecPerf, instead of fitted models.
            parameters: arguments of the constructor.

        Raises:
            ConfigError: the paper has no model of the kernel form.
        """
        options, form = setup.options, setup.preset.kernel_form
        try:
            if step_models is not None:
                prefill, decode = step_models
            elif setup.profile is not None:
                prefill, decode = performance_models(setup.profile, form, options.prompt_tokens, options.output_tokens)
            else:
                prefill, decode = models_of_costs(options.costs, form, options.prompt_tokens)
        except ValueError as error:
            raise ConfigError(f"routing toppings: {error}") from error
        slo_s = options.tpot_s or (0.0 if options.has_default_slo else inf)
        return cls(prefill, decode, slo_s, prompt_tokens=options.prompt_tokens, **parameters)

    def _set(self, prefill: PerformanceModel, decode: PerformanceModel) -> None:
        self._prefill = prefill if self._empty_is_free else msgspec.structs.replace(prefill, fixed_s=0.0)
        self._decode = decode
        self._slo_s = self._given_slo_s or UNLOADED_TIMES * decode.fixed_s

    def learn(self, costs: ReplicaCosts) -> None:
        """Fit both models again."""
        self._set(*models_of_costs(costs, self._decode.form, self._prompt_tokens))

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the replica with the smallest cost."""
        candidates = with_capacity(request, fleet, self.candidates(request, fleet, places.table))
        if not len(candidates):
            return None
        costs = self.costs(request, fleet)
        chosen = least(candidates, costs.breaks_slo, costs.total, costs.cost, costs.requests)
        return Choice(fleet.info(chosen).replica)

    def costs(self, request: RoutingRequest, fleet: Fleet) -> ToppingsCosts:
        """Return the cost of a request at each replica."""
        loads, rank = fleet.loads, request.rank
        _, prefill_s = self._prefill.added_seconds(
            loads.queued, loads.queued_rows, loads.queued_largest_rank, loads.queued_total_rank, rank
        )
        after_s, decode_s = self._decode.added_seconds(
            loads.requests, loads.rows, loads.largest_rank, loads.total_rank, rank
        )
        spread = fleet.averages.output_tokens
        cost = prefill_s / spread + decode_s + self._prefill.token_s * request.known_tokens / spread
        return ToppingsCosts(after_s > self._slo_s, cost, loads.requests, cost * loads.requests)
