"""Reports the token counts and times of an answer to clients."""

import time
from typing import Any

from lorikeet.serving.generation import Generation


def usage_of(generation: Generation) -> dict[str, Any]:
    """Return the usage. A prompt with several choices counts once, with the fewest cached tokens of them."""
    prompts: dict[int, tuple[int, int]] = {}
    for choice in generation.choices:
        token_ids = choice.handle.request.prompt_token_ids
        cached_tokens = choice.handle.timings.cached_tokens
        known = prompts.get(id(token_ids), (0, cached_tokens))
        prompts[id(token_ids)] = len(token_ids), min(known[1], cached_tokens)
    prompt_tokens, cached_tokens = map(sum, zip(*prompts.values(), strict=True))
    usage = token_counts(prompt_tokens, sum(choice.completion_tokens for choice in generation.choices))
    return usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def metrics_of(generation: Generation) -> dict[str, Any]:
    """Return the times of a request in milliseconds, under vLLM's names, with the parts of TTFT that adapters add.

    The times are those of the first choice. Events that have not happened have no entry.
    """
    choice = generation.choices[0]
    timings = choice.handle.timings
    tokens = choice.completion_tokens
    admitted_s = timings.admitted_s
    first_s = timings.first_token_s
    ended_s = timings.finished_s or time.monotonic()  # a stop string ends an answer before the engine's end arrives
    found: dict[str, Any] = {}
    if admitted_s is not None:
        queued_s = admitted_s - timings.arrival_s
        found |= {"queue_time_ms": queued_s, "adapter_time_ms": timings.adapter_wait_s, "kv_time_ms": timings.kv_wait_s}
    if first_s is not None:
        found |= {"time_to_first_token_ms": first_s - timings.arrival_s, "generation_time_ms": ended_s - first_s}
        if tokens > 1:
            found["mean_itl_ms"] = (ended_s - first_s) / (tokens - 1)
    found = {name: round(1e3 * max(0.0, seconds), 3) for name, seconds in found.items()}
    if admitted_s is not None and ended_s > admitted_s:
        found["tokens_per_second"] = round(tokens / (ended_s - admitted_s), 3)
    return found


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the token counts without details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
