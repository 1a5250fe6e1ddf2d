"""An engine in this process, driven until all its requests have ended."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import EngineStats
from lorikeet.core.plan import Token
from lorikeet.core.request import Request
from lorikeet.engine.build import Replica, build_replica


@contextmanager
def replica(model: Path, dtype: str, **engine: object) -> Iterator[Replica]:
    """Build a replica of ``model`` and close it in the end; ``engine`` are engine settings."""
    given = EngineSettings(**engine)  # type: ignore[arg-type]
    built = build_replica(Settings(ModelSettings(model=str(model), dtype=dtype), given))
    try:
        yield built
    finally:
        built.engine.close()


def run_all(
    built: Replica,
    requests: Iterable[Request],
    on_turn: Callable[[EngineStats], None] = lambda stats: None,
) -> dict[RequestId, list[Token]]:
    """Submit all requests at once, run them to their end and return their tokens.

    Raises:
        RuntimeError: one of them failed.
    """
    engine, tokens = built.engine, dict[RequestId, list[Token]]()
    for request in requests:
        tokens[request.request_id] = []
        engine.submit(request)
    while engine.has_requests:
        outputs = engine.step()
        for output in outputs.tokens:
            tokens[output.request_id].append(output.token)
        for event in outputs.events:
            if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                raise RuntimeError(f"{event.request_id}: {event.error}")
        on_turn(engine.stats())
        if not engine.is_busy and engine.has_requests:
            engine.wait_for_load()
    return tokens
