"""Vectors of prompts from an engine."""

import msgspec
import numpy as np

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Pooling, Request
from lorikeet.engine.loop import Engine
from tests.support.live import greedy


def pooled(name: str, token_ids: list[int], pooling: Pooling, adapter: AdapterRef | None = None) -> Request:
    return msgspec.structs.replace(greedy(name, token_ids, 1, adapter, logprobs=None), pooling=pooling)


def collect(engine: Engine) -> dict[str, np.ndarray]:
    """Run until nothing is left; return the vectors, and check that their requests got no tokens."""
    found = {}
    sampled = set[str]()
    while engine.has_requests:
        outputs = engine.step()
        found |= {each.request_id: np.frombuffer(each.data, "<f4") for each in outputs.pooled}
        sampled |= {each.request_id for each in outputs.tokens}
        if not engine.is_busy:
            engine.wait_for_transfer()
    assert not sampled & found.keys()
    return found
