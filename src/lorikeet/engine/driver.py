"""Feeds an engine in this process with requests as they arrive, on the engine's clock."""

import math
from collections.abc import Callable, Iterable

from lorikeet.core.clock import WaitableClock
from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request
from lorikeet.engine.loop import Engine


def drive(
    engine: Engine,
    clock: WaitableClock,
    requests: Iterable[Request],
    on_outputs: Callable[[StepOutputs], None],
    *,
    coalesced: bool = False,
) -> None:
    """Submit each request at its ``arrival_s`` and run until all have ended.

    An open loop: requests arrive when they do, however far behind the engine is. ``arrival_s`` stays what the workload
    says, so a request that comes while a step runs has waited since then.

    Args:
        engine: on ``clock``.
        clock: real or virtual.
        requests: by ascending ``arrival_s`` of that clock; taken one by one, as late as possible.
        on_outputs: called with what each turn brought.
        coalesced: on a virtual clock, run steps together that would be planned alike (``Engine.step``).

    Raises:
        ExecutorError: a step failed.
    """
    arriving = iter(requests)
    coming = next(arriving, None)
    while coming is not None or engine.has_requests:
        while coming is not None and coming.arrival_s <= clock.now():
            engine.submit(coming)
            coming = next(arriving, None)
        if not engine.has_requests and coming is not None:
            clock.wait_until(coming.arrival_s)
            continue
        next_s = math.inf if coming is None else coming.arrival_s
        on_outputs(engine.step(next_s if coalesced else None))
        if not engine.is_busy and engine.has_requests:
            engine.wait_for_load(None if coming is None else max(0.0, next_s - clock.now()))
