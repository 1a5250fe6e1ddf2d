"""Counts the tokens of an answer as clients are told them."""

from typing import Any

from lorikeet.api.generation import Generation


def usage_of(generation: Generation) -> dict[str, Any]:
    """Return the usage. Each prompt counts once for all its choices, with the fewest cached tokens of any of them."""
    prompts: dict[int, tuple[int, int]] = {}
    for choice in generation.choices:
        token_ids, cached_tokens = choice.handle.request.prompt_token_ids, choice.handle.timings.cached_tokens
        known = prompts.get(id(token_ids), (0, cached_tokens))
        prompts[id(token_ids)] = len(token_ids), min(known[1], cached_tokens)
    prompt_tokens, cached_tokens = map(sum, zip(*prompts.values(), strict=True))
    usage = token_counts(prompt_tokens, sum(choice.completion_tokens for choice in generation.choices))
    return usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage without details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
