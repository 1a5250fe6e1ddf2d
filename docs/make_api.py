"""Write the tables of ``docs/api.md`` from the rows of the routes and from ``FIELDS``.

.venv/bin/python docs/make_api.py
"""

from pathlib import Path
from typing import NamedTuple

from lorikeet.api.route_table import all_routes

PAGE = Path(__file__).with_name("api.md")

_BY = "made by docs/make_api.py"
_METHODS = ("GET", "POST", "PATCH", "DELETE")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)


class BodyField(NamedTuple):
    """One or several fields that belong together.

    Attributes:
        names: the fields' names.
        meaning: their limits and differences, for the docs page.
        routes: the routes that support them; empty if none does. Another one of ``BOTH`` refuses them with 501, unless
            they are part of its own body.
    """

    names: tuple[str, ...]
    meaning: str = ""
    routes: tuple[str, ...] = BOTH


FIELDS = (
    BodyField(("model", "lora_path"), "[which model](#which-model)"),
    BodyField(
        ("lora", "merged_adapters", "adapter_parameters"),
        "a [mixture of adapters](#mixtures) in the form of llama.cpp and LoRAX, if not empty",
    ),
    BodyField(
        ("messages",),
        "content as a string, or as parts: text, [images](#images); other parts are 400; other fields of a "
        "message go to the template unless they are null",
        (CHAT,),
    ),
    BodyField(("prompt",), "text, token ids, or a list of either", (COMPLETIONS,)),
    BodyField(
        ("prompt_embeds",),
        "instead of a prompt: a tensor `[tokens, hidden]` of float32, float16 or bfloat16, as `torch.save` writes it, "
        "in base64; or up to 128 of them. No code in it is run; KV is reused for the same numbers only. Not with "
        "`echo`, `prompt_logprobs`, `return_token_ids` or `truncate_prompt_tokens`",
        (COMPLETIONS,),
    ),
    BodyField(
        ("max_tokens", "max_completion_tokens"),
        "≥ 1; the second wins. Default: the rest of the context (chat), 16 (completions). Completions: 0 scores the "
        "prompt only",
    ),
    BodyField(("min_tokens", "ignore_eos"), "stop strings also count only after `min_tokens`"),
    BodyField(("n",), "≤ 128; choice *i* samples with a seed derived from `seed` and *i*"),
    BodyField(
        ("best_of",),
        "≤ 128: the number of answers that are generated; the `n` with the highest mean log probability are returned. "
        "Not in a stream",
        (COMPLETIONS,),
    ),
    BodyField(
        ("stream", "stream_options"),
        "`include_usage` and `continuous_usage_stats` need `stream`; the last one includes the usage at the end too, "
        "unless `include_usage` is `false`",
    ),
    BodyField(
        ("stop", "include_stop_str_in_output"),
        "≤ 64 strings of ≤ 1,024 characters; found in the text, regardless of token boundaries",
    ),
    BodyField(("stop_token_ids",), "≤ 1,024; `stop_reason` is the one that ended the answer"),
    BodyField(("seed",), "64 bits; drawn at random if not given"),
    BodyField(
        ("temperature", "top_p", "top_k", "min_p"),
        "`temperature: 0` is greedy, 10⁶ the maximum; `top_k` 0 or -1: all tokens",
    ),
    BodyField(
        ("presence_penalty", "frequency_penalty", "repetition_penalty"),
        "-2 to 2; `repetition_penalty`: 10⁻⁶ to 10⁶",
    ),
    BodyField(
        ("logit_bias", "allowed_token_ids"),
        "token id → -100 to 100; the only tokens that answers may have. At most 65,536 entries each for all sequences "
        "of a request together",
    ),
    BodyField(("bad_words",), "≤ 256 texts that the answer may not contain, as vLLM tokenizes them"),
    BodyField(
        ("response_format", "structured_outputs", "json_schema", "regex", "ebnf"),
        "[structured output](#structured-output)",
    ),
    BodyField(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
        "vLLM's older names: [structured output](#structured-output)",
    ),
    BodyField(
        ("logprobs",),
        "≤ `--max-logprobs` (20), -1: the vocabulary; of the distribution that `logprobs_mode` names; "
        "a part of a character is `bytes:\\xe2\\x80`, as at OpenAI. Chat: true, with `top_logprobs`",
    ),
    BodyField(
        ("logprobs_mode",), "`raw_logprobs` or `processed_logprobs` instead of the [server's](#training-loops) mode"
    ),
    BodyField(("top_logprobs",), "as `logprobs` of completions", (CHAT,)),
    BodyField(("logprob_token_ids",), "≤ 1,024 tokens to report with each token instead of the likeliest"),
    BodyField(
        ("prompt_logprobs",),
        "[log probabilities of the prompt](#scoring-prompts); not in a stream",
    ),
    BodyField(("return_token_ids",), "`token_ids`, and `prompt_token_ids`; in a stream with its first chunk"),
    BodyField(("return_tokens_as_token_ids",), "log probabilities name tokens `token_id:ID`"),
    BodyField(("expect_digest",), "digest of the weights that must answer, or its beginning: [proof](#proof)"),
    BodyField(
        ("return_weight_versions",), "each choice, in a stream its last chunk, has `weight_versions`: [proof](#proof)"
    ),
    BodyField(
        ("truncate_prompt_tokens", "truncation_side"),
        "number of tokens kept from a longer prompt, its last (`left`, the default) or first; -1: as many as leave "
        "space for `max_tokens`",
    ),
    BodyField(("skip_special_tokens",), "default true"),
    BodyField(("add_special_tokens",), "in chat the template writes them", (COMPLETIONS,)),
    BodyField(
        ("echo",),
        "completions: opens with the prompt, with `logprobs` [scored](#scoring-prompts). Chat: opens with the last "
        "message, if its role is `assistant` or `add_generation_prompt` is false",
    ),
    BodyField(
        ("add_generation_prompt", "chat_template_kwargs"),
        "`chat_template_kwargs` may set the first and `continue_final_message`, as in vLLM",
        (CHAT,),
    ),
    BodyField(
        ("continue_final_message",), "the answer continues the last message; not with `add_generation_prompt`", (CHAT,)
    ),
    BodyField(
        ("chat_template", "documents"),
        "name of one of the model's [templates](#chat-templates), or a template's text; documents for a template that "
        "reads them",
        (CHAT,),
    ),
    BodyField(("priority",), "lower runs earlier, with presets that use it: [below](#tenants-priorities-and-targets)"),
    BodyField(
        ("cache_salt",), "only requests with the same salt reuse its KV; [below](#tenants-priorities-and-targets)"
    ),
    BodyField(("tools", "tool_choice", "parallel_tool_calls"), "[tools](#tools)", (CHAT,)),
    BodyField(("include_reasoning",), "[reasoning](#reasoning); default true", (CHAT,)),
    BodyField(("thinking_token_budget",), "largest number of tokens of thoughts; [reasoning](#reasoning)", (CHAT,)),
    BodyField(("service_tier",), "`flex`: runs only when no other request waits; other values have no effect"),
    BodyField(("user",), "accepted, no effect; `metadata` and `store` likewise"),
    BodyField(("functions", "function_call"), "use `tools` and `tool_choice`", ()),
    BodyField(("use_beam_search", "suffix"), "", ()),
    BodyField(("input_embeds",), "use `prompt_embeds` of `/v1/completions`", ()),
    BodyField(("logits_processors", "custom_logit_processor"), "", ()),
    BodyField(("stop_regex", "repetition_detection"), "", ()),
    BodyField(("kv_transfer_params", "ec_transfer_params", "session_params"), "", ()),
    BodyField(("spaces_between_special_tokens",), "`false`; `true` is fine", ()),
    BodyField(("return_hidden_states", "watermarking"), "", ()),
    BodyField(("modalities", "audio"), "only text", ()),
    BodyField(
        ("adapter_id", "adapter_source"),
        "LoRAX's, unless empty; put the adapter's name into `model`",
        (),
    ),
)
"""In the order of the docs page."""


def page() -> str:
    """Return the page with its tables as they should be."""
    text = PAGE.read_text()
    for name, rows in (("routes", _routes()), ("fields", _fields())):
        begin, end = f"<!-- {name}: {_BY} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.partition(end)[2]}"
    return text


def _routes() -> list[str]:
    """Return a line for each note, with the routes that have it."""
    lines: dict[tuple[str, bool], dict[str, list[str]]] = {}
    for row, _, _ in all_routes():
        methods = lines.setdefault((row.note, row.is_supported), {})
        for path in row.paths:
            methods.setdefault(path.replace(":path}", "}"), []).extend(row.methods)
    rows = ["| route | state | notes |", "|---|---|---|"]
    for (note, is_supported), methods in lines.items():
        names = ", ".join(f"`{'/'.join(sorted(each, key=_METHODS.index))} {path}`" for path, each in methods.items())
        rows.append(f"| {names} | {'now' if is_supported else '501'} | {note} |")
    return rows


def _fields() -> list[str]:
    rows = ["| field | routes | notes |", "|---|---|---|"]
    for field in FIELDS:
        names = ", ".join(f"`{name}`" for name in field.names)
        where = "both" if field.routes == BOTH else "chat" if field.routes == (CHAT,) else "completions"
        rows.append(f"| {names} | {where if field.routes else '501'} | {field.meaning} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
