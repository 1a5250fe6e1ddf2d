"""Requests to a memory, and what it has cached for them."""

from lorikeet.core.events import Admitted
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request


def ask(
    bench: Bench, name: str, prompt: list[int], adapter_name: str | None = None, blocks: int = 2, **more: object
) -> None:
    """Let one request run to its end, alone."""
    ref = None if adapter_name is None else adapter(adapter_name, blocks)
    bench.engine.submit(request(name, prompt, bench.clock.now(), ref, **{"max_tokens": 2, **more}))
    bench.run()


def cached_tokens(bench: Bench) -> dict[str, int]:
    """What each request found."""
    return {e.request_id: e.cached_tokens for e in bench.events if isinstance(e, Admitted)}


def words(first: int, blocks: int) -> list[int]:
    """A prompt of whole blocks and one token more."""
    return [first + index for index in range(blocks * BLOCK_TOKENS + 1)]
