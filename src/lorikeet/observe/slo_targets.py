"""Reads the SLO targets of a server and its adapters, and counts whether requests met them."""

from collections.abc import Mapping

from lorikeet.config import ClusterSettings, ConfigError, ServerSettings
from lorikeet.core.request import Slo, SloError, parse_slo
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.traffic import RequestCounts


class SloTargets:
    """Holds the SLO targets of requests.

    Args:
        common: the server's targets.
        of_adapters: targets of adapters by name. A missing target is the server's; 0 means no target.

    Attributes:
        exist: whether any request has a target.
    """

    def __init__(self, common: Slo, of_adapters: Mapping[str, Slo]) -> None:
        self._common = _without_zeros(common)
        self._of_adapters = {name: _without_zeros(_with_defaults(slo, common)) for name, slo in of_adapters.items()}
        self.exist = self._common != Slo() or bool(of_adapters)

    def of(self, adapter: str | None) -> Slo | None:
        """Return the targets for requests to an adapter (None for the base model); None without targets."""
        slo = self._common if adapter is None else self._of_adapters.get(adapter, self._common)
        return None if slo == Slo() else slo


def read_targets(settings: ServerSettings, cluster: ClusterSettings) -> SloTargets:
    """Return the targets in the settings.

    Args:
        settings: the server's settings.
        cluster: the cluster's settings, with the number of replicas.

    Raises:
        ConfigError: an entry of ``adapter_slos`` cannot be read; or ``shed`` is set without a TTFT target, or with
            several replicas.
    """
    of_adapters: dict[str, Slo] = {}
    for entry in settings.adapter_slos:
        name, _, limits = entry.partition("=")
        try:
            slo = parse_slo(limits)
        except SloError as error:
            raise ConfigError(f"adapter_slos: {entry!r}: {error}") from error
        if not name or slo == Slo() or slo.e2e_s is not None:
            raise ConfigError(f"adapter_slos: {entry!r} must have the form name=ttft=0.5,tpot=0.1")
        of_adapters[name] = _with_defaults(slo, of_adapters.get(name, Slo()))
    if settings.shed and not any((settings.slo_ttft_s, *(slo.ttft_s for slo in of_adapters.values()))):
        raise ConfigError("shed needs a target for the time to first token: set slo_ttft_s or adapter_slos")
    if settings.shed and max(cluster.replicas, cluster.max_replicas) > 1:
        raise ConfigError(
            "shed works only with one replica: the forecast cannot distinguish the queues of several replicas"
        )
    return SloTargets(Slo(settings.slo_ttft_s, settings.slo_tpot_s), of_adapters)


def attainment(ended: EndedRequest) -> RequestCounts:
    """Return the targets that a request met and missed.

    An aborted request counts for neither. A failed request has missed all its targets. An answer of one token has no
    time per output token.
    """
    slo = ended.request.slo
    if slo is None or ended.reason == "abort":
        return RequestCounts()
    first_s = ended.timings.first_token_s
    ttft_s = ended.ttft_s
    if ended.reason == "error" or first_s is None or ttft_s is None:
        return missed(slo)
    counts = RequestCounts()
    if slo.ttft_s is not None:
        counts.ttft_met = ttft_s <= slo.ttft_s
        counts.ttft_missed = not counts.ttft_met
    if slo.tpot_s is not None and ended.completion_tokens > 1:
        counts.tpot_met = (ended.ended_s - first_s) / (ended.completion_tokens - 1) <= slo.tpot_s
        counts.tpot_missed = not counts.tpot_met
    return counts


def missed(slo: Slo | None, requests: int = 1) -> RequestCounts:
    """Return the counts of ``requests`` requests that missed all of their targets."""
    if slo is None:
        return RequestCounts()
    return RequestCounts(
        ttft_missed=requests * (slo.ttft_s is not None), tpot_missed=requests * (slo.tpot_s is not None)
    )


def _with_defaults(slo: Slo, other: Slo) -> Slo:
    """Return ``slo`` with missing targets taken from ``other``."""
    return Slo(
        other.ttft_s if slo.ttft_s is None else slo.ttft_s,
        other.tpot_s if slo.tpot_s is None else slo.tpot_s,
    )


def _without_zeros(slo: Slo) -> Slo:
    return Slo(slo.ttft_s or None, slo.tpot_s or None)
