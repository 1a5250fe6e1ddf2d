"""Defines the body of vLLM's ``POST /inference/v1/generate``, in which prompt and answer are token ids.

Trainers use this route: SkyRL, prime-rl's renderers, and the tiers in front of a vLLM that only computes.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from lorikeet.chat.protocol import (
    Body,
    CompletionRequest,
    ExpectedDigest,
    StreamOptions,
    TokenIds,
    is_known,
    refuse_unsupported,
    validated,
)
from lorikeet.http.errors import bad_request, in_words

_ONLY_TEXT = "Only text is supported."
_NO_MOVES = "Moving KV by a request is not supported."

_DEFAULTS = {
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""vLLM's own defaults, without the model's: a trainer must know the distribution that it samples from."""

_NO_EFFECT = frozenset(
    {
        "output_kind",
        "detokenize",
        "skip_clone",
        "flat_logprobs",
        "extra_args",
        "output_text_buffer_length",
        "skip_reading_prefix_cache",
    }
)
"""Fields of vLLM's sampling parameters that change how its engine works, or the form of its internal answer, only."""

_OUTSIDE = frozenset({"prompt", "model", "stream", "stream_options", "cache_salt", "priority", "lora_path", "echo"})
"""Fields of a completion that are no sampling parameters."""


class TokensRequest(Body):
    """Body of ``POST /inference/v1/generate``."""

    refused: ClassVar = {
        "features": (({},), _ONLY_TEXT),
        "content_parts": (([],), _ONLY_TEXT),
        "kv_transfer_params": (({},), _NO_MOVES),
    }

    token_ids: TokenIds
    sampling_params: dict[str, Any] | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = None
    expect_digest: ExpectedDigest | None = None
    return_weight_versions: bool | None = None

    def completion(self) -> CompletionRequest:
        """Return the body as a completion.

        Raises:
            ApiError: 400 or 501, a field is not valid or not supported.
        """
        refuse_unsupported(self)
        params = {name: value for name, value in (self.sampling_params or {}).items() if name not in _NO_EFFECT}
        given = {name for name, value in params.items() if value is not None}
        unknown = {name for name in given if not is_known(CompletionRequest, name)}
        if wrong := sorted(_OUTSIDE & params.keys() | unknown):
            raise bad_request(f"{wrong[0]} is not a sampling parameter.", f"sampling_params.{wrong[0]}")
        own = self.model_dump(
            exclude_unset=True,
            exclude={"token_ids", "sampling_params", "request_id"},
            include=set(type(self).model_fields),
        )
        fields = {name: value for name, value in own.items() if value is not None}
        defaults = {name: value for name, value in _DEFAULTS.items() if name not in params}
        with in_words(WORDS):
            completion = validated(CompletionRequest, defaults | params | fields | {"prompt": self.token_ids})
            refuse_unsupported(completion)
        return completion


WORDS = {
    name: f"sampling_params.{name}"
    for name in CompletionRequest.model_fields.keys() - TokensRequest.model_fields.keys()
} | {"prompt": "token_ids"}
"""The body's names of a completion's fields, for errors."""
