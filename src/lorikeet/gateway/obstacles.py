"""Which streamed answers can go on at another backend, by what was asked."""

from typing import Any

from lorikeet.gateway.questions import Question

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
}
"""Fields with which an answer is more than its text, or depends on more than prompt and text so far, and the values
with which it is not; null is one for all."""


def obstacle(question: Question) -> str | None:
    """Return why an answer, once begun, could not go on at another backend; None if it can."""
    for name, neutral in _NEUTRAL.items():
        value = question.fields.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            return f"it was asked for with {name}"
    if not isinstance(question.fields.get("stream_options"), dict | None):
        return "its stream_options are not understood"
    if question.is_chat:
        return _obstacle_of_messages(question)
    prompt = question.fields.get("prompt")
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    return None if isinstance(prompt, str) or is_tokens else "it has several prompts"


def _obstacle_of_messages(question: Question) -> str | None:
    messages = question.fields.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "its messages are not understood"
    if question.fields.get("continue_final_message") is True:
        return None if isinstance(messages[-1].get("content"), str) else "its last message is not plain text"
    has_opening = question.fields.get("add_generation_prompt") is not False
    return None if has_opening else "it was asked for without a generation prompt"
