"""Defines the request records of a load run, and computes figures from them. Times are in seconds, rates per second."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from lorikeet.core.request import Slo


class RequestResult(msgspec.Struct, frozen=True):
    """Records one request and its answer, with times in seconds since the run began.

    Attributes:
        adapter: name of the adapter; None for the base model.
        due_s: planned arrival time in the workload.
        sent_s: time at which the request was sent.
        ended_s: time at which the answer was complete, or failed.
        held_s: seconds for which the request was held back by the limit on requests in flight, or until the earlier
            answer was complete.
        token_times_s: arrival time of each event with new tokens.
        input_tokens: length of the prompt, as counted by the server if it reports the count.
        output_tokens: length of the answer, as counted by the server; otherwise the number of events with text.
        asked_tokens: requested length.
        cached_tokens: number of prompt tokens found in the server's prefix cache; None if the server does not report
            it.
        error: kind of the error; None for a complete answer.
        message: the error message of the server or the connection.
        slo: limits of this request.
    """

    adapter: str | None
    due_s: float
    sent_s: float
    ended_s: float
    held_s: float = 0.0
    token_times_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None
    message: str = ""
    slo: Slo | None = None

    @property
    def lateness_s(self) -> float:
        """Return the seconds by which the client sent the request late."""
        return max(0.0, self.sent_s - self.due_s - self.held_s)

    @property
    def ttft_s(self) -> float | None:
        """Return the time from sending to the first token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per output token after the first; None for answers of one token."""
        if not self.token_times_s or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Return the gaps between events with tokens (ITL)."""
        times_s = self.token_times_s
        return [after - before for before, after in pairwise(times_s)]

    @property
    def e2e_s(self) -> float:
        """Return the time from sending to the end of the answer."""
        return self.ended_s - self.sent_s

    def meets(self, common: Slo) -> bool:
        """Return whether the answer is complete and within the limits.

        These are the request's limits, or ``common`` if it has none.
        """
        limits = self.slo or common
        if self.error is not None:
            return False
        pairs = ((self.ttft_s, limits.ttft_s), (self.tpot_s, limits.tpot_s), (self.e2e_s, limits.e2e_s))
        return all(limit is None or measured is None or measured <= limit for measured, limit in pairs)


class Distribution(msgspec.Struct, frozen=True):
    """Holds the mean and percentiles (linear between values) of ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Summarise ``values`` without missing values; return None if no value is left."""
    present = np.asarray([value for value in values if value is not None], dtype=np.float64)
    if not present.size:
        return None
    return Distribution(len(present), float(present.mean()), *np.percentile(present, [50, 90, 95, 99]).tolist())


def jain_index(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (Σx)² / (n Σx²): 1 if all values are equal, 1/n if only one value is not zero.

    Source: R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and Discrimination for Resource Allocation
    in Shared Computer Systems", DEC-TR-301, 1984. None without values, or if all are zero.
    """
    x = np.asarray(values, dtype=np.float64)
    squares = float((x * x).sum())
    return float(x.sum()) ** 2 / (len(x) * squares) if squares else None


class AdapterResults(msgspec.Struct, frozen=True):
    """Holds the figures of one adapter.

    Attributes:
        adapter: name of the adapter; None for the base model.
        requests, failed: number of requests sent, and number of failed ones.
        ttft_s, tpot_s, e2e_s: of complete answers.
        cold_ttft_s: TTFT of the adapter's first request of the run.
        normalised_s: mean E2E per output token.
        slo_attainment: share of the adapter's requests that met the SLO; None without limits.
    """

    adapter: str | None
    requests: int
    failed: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    cold_ttft_s: float | None
    normalised_s: float | None
    slo_attainment: float | None


class ErrorFigures(msgspec.Struct, frozen=True):
    """Counts an error kind, with its first message."""

    count: int
    example: str


class LoadFigures(msgspec.Struct, frozen=True):
    """Holds the figures of a run.

    Attributes:
        requests, completed: number of requests sent, and of complete answers.
        short_answers: number of complete answers with fewer tokens than requested.
        errors: the errors, by kind.
        duration_s: time from the first request to the end of the last complete answer.
        offered_rate: requests per second between the first and the last sending.
        request_rate, output_token_rate, token_rate: rates of complete answers, per second of the duration.
        ttft_s, tpot_s, itl_s, e2e_s: latencies of complete answers.
        cold_ttft_s: TTFT of each adapter's first request in this run.
        warm_ttft_s: TTFT of all other requests.
        tokens_per_event: mean number of tokens per event. Above 1, a gap of ITL covers several tokens.
        slo_attainment: share of the requests sent that met the SLO; None without limits.
        goodput: requests per second that met the SLO; None without limits.
        fairness: Jain's index over the adapters' mean E2E per output token.
        most_under_way: largest number of requests in flight at one time.
        lateness_s: seconds by which the client sent requests late.
        held_s: seconds for which due requests were held back by the limit on requests in flight or, if turns contain
            answers, until the earlier answer was complete.
        cached_share: share of prompt tokens found in the server's prefix cache; None if the server does not report it.
        adapters: figures of each adapter, in order of decreasing number of requests.
    """

    requests: int
    completed: int
    short_answers: int
    errors: dict[str, ErrorFigures]
    duration_s: float
    offered_rate: float | None
    request_rate: float
    output_token_rate: float
    token_rate: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    cold_ttft_s: Distribution | None
    warm_ttft_s: Distribution | None
    tokens_per_event: float | None
    slo_attainment: float | None
    goodput: float | None
    fairness: float | None
    most_under_way: int
    lateness_s: Distribution | None
    held_s: Distribution | None
    cached_share: float | None
    adapters: list[AdapterResults]


def summarise(exchanges: Sequence[RequestResult], slo: Slo) -> LoadFigures:
    """Return the figures of a run.

    Args:
        exchanges: at least one record.
        slo: limits for requests that have none.
    """
    whole = [exchange for exchange in exchanges if exchange.error is None]
    sent_s = sorted(exchange.sent_s for exchange in exchanges)
    # At least 1 ns keeps the rates of a run without duration finite. The run ends with the last complete answer,
    # because otherwise a request that hangs until its timeout would lower all rates.
    duration_s = max(max(exchange.ended_s for exchange in whole or exchanges) - sent_s[0], 1e-9)
    span_s = sent_s[-1] - sent_s[0]
    output_tokens = sum(exchange.output_tokens for exchange in whole)
    input_tokens = sum(exchange.input_tokens for exchange in whole)
    events = sum(len(exchange.token_times_s) for exchange in whole)
    attainment = slo_attainment(exchanges, slo)
    adapters = [_adapter_figures(adapter, group, slo) for adapter, group in by_adapter(exchanges).items()]
    cold = {id(group[0]) for adapter, group in by_adapter(exchanges).items() if adapter is not None}
    return LoadFigures(
        requests=len(exchanges),
        completed=len(whole),
        short_answers=sum(exchange.output_tokens < exchange.asked_tokens for exchange in whole),
        errors=_error_figures(exchanges),
        duration_s=duration_s,
        offered_rate=(len(exchanges) - 1) / span_s if span_s else None,
        request_rate=len(whole) / duration_s,
        output_token_rate=output_tokens / duration_s,
        token_rate=(input_tokens + output_tokens) / duration_s,
        ttft_s=distribution(exchange.ttft_s for exchange in whole),
        tpot_s=distribution(exchange.tpot_s for exchange in whole),
        itl_s=distribution(gap_s for exchange in whole for gap_s in exchange.gaps_s),
        e2e_s=distribution(exchange.e2e_s for exchange in whole),
        cold_ttft_s=distribution(exchange.ttft_s for exchange in whole if id(exchange) in cold),
        warm_ttft_s=distribution(exchange.ttft_s for exchange in whole if id(exchange) not in cold),
        tokens_per_event=output_tokens / events if events else None,
        slo_attainment=attainment,
        goodput=None if attainment is None else attainment * len(exchanges) / duration_s,
        fairness=_fairness(adapters),
        most_under_way=most_under_way(exchanges),
        lateness_s=distribution(exchange.lateness_s for exchange in exchanges),
        held_s=distribution(exchange.held_s for exchange in exchanges),
        cached_share=_cached_share(whole),
        adapters=sorted(adapters, key=lambda each: (-each.requests, each.adapter or "")),
    )


def _fairness(adapters: Sequence[AdapterResults]) -> float | None:
    """Return Jain's index; None if an adapter has no complete answer, so that its time is unknown."""
    times = [each.normalised_s for each in adapters]
    known = [each for each in times if each is not None]
    return jain_index(known) if len(known) == len(times) else None


def slo_attainment(exchanges: Sequence[RequestResult], common: Slo) -> float | None:
    """Return the share of ``exchanges`` that met their limits; None without limits."""
    if common == Slo() and not any(exchange.slo for exchange in exchanges):
        return None
    return sum(exchange.meets(common) for exchange in exchanges) / len(exchanges)


def by_adapter(exchanges: Iterable[RequestResult]) -> dict[str | None, list[RequestResult]]:
    """Return the records of each adapter, in the order of sending."""
    groups: dict[str | None, list[RequestResult]] = {}
    for exchange in sorted(exchanges, key=lambda exchange: exchange.sent_s):
        groups.setdefault(exchange.adapter, []).append(exchange)
    return groups


def most_under_way(exchanges: Iterable[RequestResult]) -> int:
    """Return the largest number of requests that were in flight at one time."""
    # At the same time, ends (-1) come before starts (+1).
    changes = sorted(change for each in exchanges for change in ((each.sent_s, 1), (each.ended_s, -1)))
    return int(np.cumsum([step for _, step in changes]).max(initial=0))


def _adapter_figures(adapter: str | None, group: Sequence[RequestResult], slo: Slo) -> AdapterResults:
    whole = [exchange for exchange in group if exchange.error is None]
    per_token_s = [exchange.e2e_s / exchange.output_tokens for exchange in whole if exchange.output_tokens]
    return AdapterResults(
        adapter=adapter,
        requests=len(group),
        failed=len(group) - len(whole),
        ttft_s=distribution(exchange.ttft_s for exchange in whole),
        tpot_s=distribution(exchange.tpot_s for exchange in whole),
        e2e_s=distribution(exchange.e2e_s for exchange in whole),
        cold_ttft_s=None if adapter is None or group[0].error is not None else group[0].ttft_s,
        normalised_s=float(np.mean(per_token_s)) if per_token_s else None,
        slo_attainment=slo_attainment(group, slo),
    )


def _error_figures(exchanges: Iterable[RequestResult]) -> dict[str, ErrorFigures]:
    failed = [exchange for exchange in exchanges if exchange.error is not None]
    examples = {exchange.error: exchange.message for exchange in reversed(failed)}
    counts = Counter(exchange.error for exchange in failed)
    return {str(kind): ErrorFigures(count, examples[kind]) for kind, count in counts.most_common()}


def _cached_share(whole: Iterable[RequestResult]) -> float | None:
    known = [exchange for exchange in whole if exchange.cached_tokens is not None]
    tokens = sum(exchange.input_tokens for exchange in known)
    return sum(exchange.cached_tokens or 0 for exchange in known) / tokens if tokens else None
