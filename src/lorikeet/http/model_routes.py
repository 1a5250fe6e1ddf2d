"""Rows of the routes that name a model or a stored response: the server answers them, the router forwards them.

The rows stand here and not beside their handlers, since the router may not import ``lorikeet.api``. Batches may name
only routes of this module.
"""

from lorikeet.http.routes import BodySize, Callers, Forwarding, Route

_RESPONSES_NOTE = "OpenAI's: see [Responses](#responses)"
_MESSAGES_NOTE = "Anthropic's: see [Messages](#messages)"
_LABELS_NOTE = "vLLM's, Jina's, Cohere's, OpenAI's: see [labels and scores](#labels-and-scores)"
_TOKENIZER_NOTE = "a prompt, or messages with the fields that shape a chat's prompt; `return_token_strs`"

CHAT = Route(
    "POST /v1/chat/completions",
    Callers.KEYS,
    BodySize.PROMPT,
    is_batchable=True,
    forwarding=Forwarding.GENERATED,
    note="streaming or not",
)
COMPLETIONS = Route(
    "POST /v1/completions",
    Callers.KEYS,
    BodySize.PROMPT,
    is_batchable=True,
    forwarding=Forwarding.GENERATED,
    note="prompt: string, strings, token ids, lists of token ids",
)
TOKENS = Route(
    "POST /inference/v1/generate",
    Callers.KEYS,
    BodySize.PROMPT,
    forwarding=Forwarding.GENERATED,
    note="vLLM's: token ids in and out, see [training loops](#training-loops)",
)
RENDER_CHAT = Route(
    "POST /v1/chat/completions/render",
    Callers.KEYS,
    BodySize.PROMPT,
    forwarding=Forwarding.COUNTED,
    note="vLLM's: the body of `/inference/v1/generate` for a chat",
)
CHAT_BATCH = Route(
    "POST /v1/chat/completions/batch",
    Callers.KEYS,
    BodySize.POOLED,
    forwarding=Forwarding.GENERATED_WHOLE,
    note="vLLM's: `messages` is a list of up to 128 conversations",
)
RESPONSES = Route(
    "POST /v1/responses",
    Callers.KEYS,
    BodySize.PROMPT,
    is_batchable=True,
    forwarding=Forwarding.GENERATED,
    note=_RESPONSES_NOTE,
)
RETRIEVE_RESPONSE = Route(
    "GET /v1/responses/{response_id}", Callers.KEYS, forwarding=Forwarding.BY_RESPONSE, note=_RESPONSES_NOTE
)
DELETE_RESPONSE = Route(
    "DELETE /v1/responses/{response_id}", Callers.KEYS, forwarding=Forwarding.BY_RESPONSE, note=_RESPONSES_NOTE
)
CANCEL_RESPONSE = Route(
    "POST /v1/responses/{response_id}/cancel", Callers.KEYS, forwarding=Forwarding.BY_RESPONSE, note=_RESPONSES_NOTE
)
RESPONSE_INPUT = Route(
    "GET /v1/responses/{response_id}/input_items",
    Callers.KEYS,
    forwarding=Forwarding.BY_RESPONSE,
    note=_RESPONSES_NOTE,
)
MESSAGES = Route(
    "POST /v1/messages", Callers.KEYS, BodySize.PROMPT, forwarding=Forwarding.GENERATED, note=_MESSAGES_NOTE
)
COUNT_TOKENS = Route(
    "POST /v1/messages/count_tokens",
    Callers.KEYS,
    BodySize.PROMPT,
    forwarding=Forwarding.COUNTED,
    note=_MESSAGES_NOTE,
)
TOKENIZE = Route("POST /tokenize", Callers.KEYS, BodySize.PROMPT, forwarding=Forwarding.COUNTED, note=_TOKENIZER_NOTE)
DETOKENIZE = Route(
    "POST /detokenize", Callers.KEYS, BodySize.PROMPT, forwarding=Forwarding.COUNTED, note=_TOKENIZER_NOTE
)
EMBEDDINGS = Route(
    "POST /v1/embeddings",
    Callers.KEYS,
    BodySize.POOLED,
    is_batchable=True,
    forwarding=Forwarding.POOLED,
    note="OpenAI's: see [embeddings](#embeddings)",
)
CLASSIFY = Route(
    "POST /classify /v1/classify", Callers.KEYS, BodySize.POOLED, forwarding=Forwarding.POOLED, note=_LABELS_NOTE
)
SCORE = Route("POST /score /v1/score", Callers.KEYS, BodySize.POOLED, forwarding=Forwarding.POOLED, note=_LABELS_NOTE)
RERANK = Route(
    "POST /rerank /v1/rerank /v2/rerank",
    Callers.KEYS,
    BodySize.POOLED,
    forwarding=Forwarding.POOLED,
    note=_LABELS_NOTE,
)
MODERATIONS = Route(
    "POST /v1/moderations", Callers.KEYS, BodySize.POOLED, forwarding=Forwarding.POOLED, note=_LABELS_NOTE
)
POOLING = Route("POST /pooling", Callers.OPERATOR, BodySize.POOLED, forwarding=Forwarding.POOLED, is_supported=False)

MODEL_ROUTES = (
    *(CHAT, COMPLETIONS, TOKENS, RENDER_CHAT, CHAT_BATCH),
    *(RESPONSES, RETRIEVE_RESPONSE, DELETE_RESPONSE, CANCEL_RESPONSE, RESPONSE_INPUT),
    *(MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE),
    *(EMBEDDINGS, CLASSIFY, SCORE, RERANK, MODERATIONS, POOLING),
)
AUTO_MODEL = "auto"
"""The name by which a request leaves the choice of the adapter to the server."""
BATCHABLE_PATHS = tuple(path for row in MODEL_ROUTES if row.is_batchable for path in row.paths)
"""Paths that the lines of a batch may name."""
