"""When the steps of a request's life happened, folded from its events."""

from dataclasses import dataclass

from lorikeet.core.events import AdapterWait, Admitted, Finished, FirstToken, Preempted, Queued, RequestEvent


@dataclass
class RequestTimings:
    """Instants on the monotonic clock, None until they happen.

    Attributes:
        arrival_s: the server accepted the request.
        queued_s: the engine first queued it.
        admitted_s: it first received blocks.
        first_token_s: its first token existed.
        finished_s: it ended.
        adapter_wait_s: time spent waiting for its adapter's transfer, before it was first admitted.
        cached_tokens: prompt tokens found in KV at the first admission.
        preemptions: how often it gave its blocks back.
    """

    arrival_s: float
    queued_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    adapter_wait_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    _adapter_wait_since_s: float | None = None

    def apply(self, event: RequestEvent) -> None:
        """Take one event in. First occurrences count; later attempts do not overwrite them."""
        match event:
            case Queued():
                self.queued_s = event.at_s if self.queued_s is None else self.queued_s
            case AdapterWait(loaded=False):
                self._adapter_wait_since_s = event.at_s
            case AdapterWait():
                if self._adapter_wait_since_s is not None and self.admitted_s is None:
                    self.adapter_wait_s += event.at_s - self._adapter_wait_since_s
                self._adapter_wait_since_s = None
            case Admitted():
                if self.admitted_s is None:
                    self.admitted_s, self.cached_tokens = event.at_s, event.cached_tokens
            case FirstToken():
                self.first_token_s = event.at_s if self.first_token_s is None else self.first_token_s
            case Preempted():
                self.preemptions += 1
            case Finished():
                self.finished_s = event.at_s
