"""When the steps of a request's life happened, folded from its events."""

from dataclasses import dataclass

from lorikeet.core.events import (
    AdapterArrived,
    Admitted,
    Finished,
    FirstToken,
    KvArrived,
    Preempted,
    Queued,
    RequestEvent,
)


@dataclass
class RequestTimings:
    """Instants on the monotonic clock, None until they happen.

    The parts of TTFT follow one another (ELORA spec, R28): in the queue until blocks are received, then until the
    adapter is there, then what KV takes beyond that, then prefill.

    Attributes:
        arrival_s: the server accepted the request.
        queued_s: the engine first queued it.
        admitted_s: it first received blocks.
        first_token_s: its first token existed.
        finished_s: it ended.
        adapter_wait_s: time from its first blocks until its adapter was there.
        kv_wait_s: time after that until its KV was there too.
        waits_for_adapter: it could not run before its adapter was there; else its prefill was assisted meanwhile.
        cached_tokens: prompt tokens found in KV at the first admission.
        preemptions: how often it gave its blocks back.
    """

    arrival_s: float
    queued_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    adapter_wait_s: float = 0.0
    kv_wait_s: float = 0.0
    waits_for_adapter: bool = False
    cached_tokens: int = 0
    preemptions: int = 0

    def apply(self, event: RequestEvent) -> None:
        """Take one event in. First occurrences count; later ones do not overwrite them."""
        first_time = self.preemptions == 0 and self.first_token_s is None
        match event:
            case Queued():
                self.queued_s = event.at_s if self.queued_s is None else self.queued_s
            case Admitted():
                if self.admitted_s is None:
                    self.admitted_s, self.cached_tokens = event.at_s, event.cached_tokens
                    self.waits_for_adapter = event.waits_for_adapter
            case AdapterArrived() if first_time and self.waits_for_adapter and self.admitted_s is not None:
                self.adapter_wait_s = event.at_s - self.admitted_s
                self.kv_wait_s = max(0.0, self.kv_wait_s - self.adapter_wait_s)
            case KvArrived() if first_time and self.admitted_s is not None:
                self.kv_wait_s = event.at_s - self.admitted_s - self.adapter_wait_s
            case FirstToken():
                self.first_token_s = event.at_s if self.first_token_s is None else self.first_token_s
            case Preempted():
                self.preemptions += 1
            case Finished():
                self.finished_s = event.at_s
