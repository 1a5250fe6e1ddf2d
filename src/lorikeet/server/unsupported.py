"""Fields that Lorikeet knows and does not implement: refused by name instead of ignored."""

from typing import Any

from lorikeet.server.errors import not_supported
from lorikeet.server.protocol import Body

SPECIAL_TOKENS = "The chat template writes the special tokens; adding more is not supported."
_TOOLS = "Tool calls are not supported yet."
_GRAMMAR = "Structured output is not supported yet; ask for the format in the prompt."
_BEAM = "Beam search is not supported."
_ADAPTER = "is not supported; name the adapter in model."

_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "response_format": (({"type": "text"},), _GRAMMAR),
    "structured_outputs": (({},), _GRAMMAR),
    "guided_json": ((), _GRAMMAR),
    "guided_regex": ((), _GRAMMAR),
    "guided_choice": ((), _GRAMMAR),
    "guided_grammar": ((), _GRAMMAR),
    "regex": ((), _GRAMMAR),
    "json_schema": ((), _GRAMMAR),
    "ebnf": ((), _GRAMMAR),
    "use_beam_search": ((False,), _BEAM),
    "best_of": ((1,), "best_of above 1 is not supported; ask for n answers and choose."),
    "suffix": (("",), "Completing before a suffix is not supported."),
    "prompt_logprobs": ((), "Log probabilities of the prompt are not supported yet."),
    "prompt_embeds": ((), "Prompts as embeddings are not supported."),
    "truncate_prompt_tokens": ((), "Truncating prompts is not supported; shorten the prompt."),
    "allowed_token_ids": (([],), "allowed_token_ids is not supported yet; use logit_bias."),
    "bad_words": (([],), "bad_words is not supported yet; use logit_bias."),
    "logits_processors": (([],), "Logits processors are not supported."),
    "cache_salt": ((), "cache_salt is not supported yet."),
    "modalities": ((["text"],), "Only text is supported."),
    "audio": ((), "Audio is not supported."),
    "chat_template": ((), "A template per request is not supported; start the server with --chat-template."),
    "documents": (([],), "documents is not supported yet; put them into a message."),
    "return_token_ids": ((False,), "return_token_ids is not supported yet; see /tokenize."),
    "return_tokens_as_token_ids": ((False,), "return_tokens_as_token_ids is not supported yet."),
    "spaces_between_special_tokens": ((True,), "spaces_between_special_tokens=false is not supported."),
    # Without these three the base would answer in the place of the adapter that was asked for.
    "lora": (([],), f"llama.cpp's lora {_ADAPTER}"),
    "adapter_id": (("",), f"LoRAX's adapter_id {_ADAPTER}"),
    "adapter_source": (("",), f"LoRAX's adapter_source {_ADAPTER}"),
    "add_special_tokens": ((False,), SPECIAL_TOKENS),
    "session_params": ((), "Sessions are not supported."),
}
"""Field → values that change nothing (null never does), and what a client is told otherwise."""


def refuse_unsupported(body: Body) -> None:
    """Check the fields that the body's model does not name.

    Raises:
        ApiError: 501 for the first one that asks for something that is not implemented.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in _FIELDS or value is None:
            continue
        neutral, message = _FIELDS[name]
        if value not in neutral:
            raise not_supported(message, name)
