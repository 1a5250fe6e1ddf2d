"""What a load generator sends: requests made by rules, or read from a workload."""

from collections.abc import Sequence

import msgspec
import numpy as np

from lorikeet.bench.arrivals import ChoiceError, Range, arrival_times, at_rate, choose_adapters, scale_lengths
from lorikeet.bench.workload import Slo, WorkloadRequest


class LoadPlan(msgspec.Struct, frozen=True):
    """The rules.

    Attributes:
        workload: requests to replay; empty to make them.
        adapters: names to choose from, None among them for the base. For a workload: given to the requests that
            name no adapter; empty to leave those to the base.
        adapter_choice: see ``choose_adapters``.
        arrivals: see ``arrival_times``; without effect on a workload.
        burstiness: of bursty arrivals.
        prompt_tokens, output_tokens: lengths of made requests.
        length_scale: factor on the lengths of a workload.
        seed: of everything drawn.
    """

    workload: tuple[WorkloadRequest, ...] = ()
    adapters: tuple[str | None, ...] = ()
    adapter_choice: str = "uniform"
    arrivals: str = "poisson"
    burstiness: float = 1.0
    prompt_tokens: Range = Range(128, 128)
    output_tokens: Range = Range(64, 64)
    length_scale: float = 1.0
    seed: int = 0

    def requests(self, count: int, rate: float | None, run: int = 0) -> list[WorkloadRequest]:
        """Return the requests of one run.

        Args:
            count: how many; of a workload the first ones, as many as it has.
            rate: requests per second. None for a workload's own times; requests by rule then arrive at once.
            run: its number; each draws anew.

        Raises:
            ChoiceError: a rule has no meaning, or none for so many requests.
        """
        generator = np.random.default_rng((self.seed, run))
        if self.workload:
            return self._replay(count, rate, generator)
        kind = "now" if rate is None else self.arrivals
        times_s = arrival_times(kind, count, 1.0 if rate is None else rate, generator, self.burstiness)
        adapters = self._adapters(count, generator)
        inputs = self.prompt_tokens.draw(count, generator)
        outputs = self.output_tokens.draw(count, generator)
        return [WorkloadRequest(*each) for each in zip(times_s, adapters, inputs, outputs, strict=True)]

    def _replay(self, count: int, rate: float | None, generator: np.random.Generator) -> list[WorkloadRequest]:
        requests: Sequence[WorkloadRequest] = scale_lengths(self.workload[:count], self.length_scale)
        if rate is not None:
            requests = at_rate(requests, rate)
        return [
            request if request.adapter is not None else msgspec.structs.replace(request, adapter=adapter)
            for request, adapter in zip(requests, self._adapters(len(requests), generator), strict=True)
        ]

    def _adapters(self, count: int, generator: np.random.Generator) -> list[str | None]:
        return choose_adapters(self.adapter_choice, self.adapters or (None,), count, generator)


def parse_slo(text: str) -> Slo:
    """Read ``ttft=0.5,tpot=0.1,e2e=10``, in seconds; any of them, or none.

    Raises:
        ChoiceError: an unknown name, or no number.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[{"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}[name.strip()]] = float(value)
        except (KeyError, ValueError):
            raise ChoiceError(f"{part!r} is no limit; write for example ttft=0.5,tpot=0.1,e2e=10 (seconds)") from None
    return Slo(**limits)
