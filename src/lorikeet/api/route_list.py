"""The routes: what each is, and whether it is supported.

``docs/make_api.py`` writes the table of ``docs/api.md`` from this list, and the tests compare it with the application
and call every route of it.
"""

from typing import NamedTuple


class ApiRoutes(NamedTuple):
    """Routes that belong together.

    Attributes:
        routes: methods and path of each.
        notes: for the docs page.
        state: ``now``, or ``501``: refused with a message.
    """

    routes: tuple[str, ...]
    notes: str = ""
    state: str = "now"

    def calls(self) -> list[tuple[str, str]]:
        """Return every method and path."""
        pairs = (route.split(" ") for route in self.routes)
        return [(method, path) for methods, path in pairs for method in methods.split("/")]


ROUTES = (
    ApiRoutes(("POST /v1/chat/completions",), "streaming or not"),
    ApiRoutes(("POST /v1/chat/completions/batch",), "vLLM's: `messages` is a list of up to 128 conversations"),
    ApiRoutes(
        (
            "POST /v1/responses",
            "GET/DELETE /v1/responses/{id}",
            "POST /v1/responses/{id}/cancel",
            "GET /v1/responses/{id}/input_items",
        ),
        "OpenAI's: see [Responses](#responses)",
    ),
    ApiRoutes(("POST /v1/messages", "POST /v1/messages/count_tokens"), "Anthropic's: see [Messages](#messages)"),
    ApiRoutes(
        ("GET/POST /v1/files", "GET/DELETE /v1/files/{id}", "GET /v1/files/{id}/content"),
        "OpenAI's: see [Batches](#batches)",
    ),
    ApiRoutes(("GET/POST /v1/batches", "GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel")),
    ApiRoutes(
        ("GET /v1/requests/{id}",),
        "what a recent request waited for, what was decided for it, and what that saved",
    ),
    ApiRoutes(("POST /v1/completions",), "prompt: string, strings, token ids, lists of token ids"),
    ApiRoutes(
        ("GET /v1/models", "GET /v1/models/{id}"),
        "the base first; `root` (its source; of a folder only the name), `parent`, `max_model_len`, `permission`",
    ),
    ApiRoutes(
        ("POST /tokenize", "POST /detokenize"),
        "a prompt, or messages with the fields that shape a chat's prompt; `return_token_strs`",
    ),
    ApiRoutes(
        ("GET /health", "GET /health/ready", "GET /health/live"),
        "`/health` and `/health/ready`: 200, or 503 while draining, or while the engine restarts or does not answer "
        '(`--heartbeat-timeout`, `--step-timeout`), with `{"status": "ready" or "draining" or "engine down", '
        '"kernels", "weights", "engine_restarts"}`; `/health/live`: always 200',
    ),
    ApiRoutes(
        ("GET/POST /ping", "GET /version", "GET /load", "GET /metrics"),
        '`/version`: `{"version"}`; `/load`: `{"server_load"}`, sequences accepted and not finished',
    ),
    ApiRoutes(("GET /docs", "GET /openapi.json"), "the routes, for browsers and client generators"),
    ApiRoutes(("GET /ui",), "the console: see [console.md](console.md)"),
    ApiRoutes(
        ("GET /v1/stats", "GET /v1/stats/stream"),
        "what the server does now, adapter by adapter: see [Statistics](#statistics)",
    ),
    ApiRoutes(("GET /v1/adapters", "POST /v1/adapters"), "see [Adapters](#adapters)"),
    ApiRoutes(("GET /v1/adapters/{name}", "DELETE /v1/adapters/{name}", "PATCH /v1/adapters/{name}")),
    ApiRoutes(("POST /v1/adapters/upload",), "weights in the body"),
    ApiRoutes(
        ("POST /pause", "POST /resume", "GET /is_paused", "GET /get_world_size"),
        "see [training loops](#training-loops)",
    ),
    ApiRoutes(("GET /v1/adapters/{name}/stats",), "its figures of [Statistics](#statistics), means, latest requests"),
    ApiRoutes(("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"), "vLLM's"),
    ApiRoutes(("POST /load_lora_adapter", "POST /unload_lora_adapter"), "SGLang's"),
    ApiRoutes(
        ("GET/POST /v1/keys", "GET/PATCH/DELETE /v1/keys/{id}", "POST /v1/keys/{id}/rotate"),
        "keys of tenants, with an admin key: see [Tenants](tenants.md)",
    ),
    ApiRoutes(("GET /v1/usage",), "what was used by day, key and model; of a tenant its own"),
    ApiRoutes(("GET /v1/audit",), "who changed which adapter and key, with an admin key"),
    ApiRoutes(("GET/POST /v1/loras", "DELETE /v1/loras/{name}"), "Dynamo's"),
    ApiRoutes(
        ("GET /v1/cluster", "POST /v1/cluster/replicas", "DELETE /v1/cluster/replicas/{id}"),
        "see [cluster.md](cluster.md#running-one)",
    ),
    ApiRoutes(("POST /v1/embeddings",), "OpenAI's: see [embeddings](#embeddings)"),
    ApiRoutes(
        (
            "POST /classify",
            "POST /v1/classify",
            "POST /score",
            "POST /v1/score",
            "POST /rerank",
            "POST /v1/rerank",
            "POST /v2/rerank",
            "POST /v1/moderations",
        ),
        "vLLM's, Jina's, Cohere's, OpenAI's: see [labels and scores](#labels-and-scores)",
    ),
    ApiRoutes(("POST /pooling",), "", "501"),
    ApiRoutes(
        (
            "POST /v1/audio/transcriptions",
            "POST /v1/audio/translations",
            "POST /v1/audio/speech",
            "POST /v1/images/generations",
        ),
        "",
        "501",
    ),
    ApiRoutes(
        ("POST /", "POST /generate", "POST /generate_stream", "GET /info"),
        "TGI's and LoRAX's: see [other servers' routes](#other-servers-routes)",
    ),
    ApiRoutes(
        (
            "POST /generate",
            "POST /abort_request",
            "POST /flush_cache",
            "GET /get_model_info",
            "GET /model_info",
            "GET /health_generate",
        ),
        "SGLang's",
    ),
    ApiRoutes(("POST /invocations", "POST /adapters", "DELETE /adapters/{name}"), "SageMaker's"),
    ApiRoutes(
        ("POST /reset_prefix_cache", "GET /server_info", "GET /get_server_info", "GET /tokenizer_info"),
        "vLLM's and SGLang's",
    ),
)
"""In the order of the docs page."""
