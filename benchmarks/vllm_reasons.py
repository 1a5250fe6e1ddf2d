"""Which of vLLM's tests run, what their models say, and why some of them do not pass: for ``benchmarks.vllm_tests``."""

_CHAT = "openai/chat_completion/test_"
FILES = {
    "completions": (
        "openai/completion/test_completion.py",
        "openai/completion/test_prompt_validation.py",
        "openai/test_chunked_prompt.py",
    ),
    "chat": (
        _CHAT + "chat.py",
        _CHAT + "chat_completion.py",
        _CHAT + "chat_echo.py",
        _CHAT + "chat_logit_bias_validation.py",
        _CHAT + "enable_force_include_usage.py",
        _CHAT + "root_path.py",
        _CHAT + "batched_chat_completions.py",
    ),
    "tokens": (
        _CHAT + "logprob_token_ids.py",
        "openai/completion/test_token_in_token_out.py",
        "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py",
        "serve/tokenize/test_tokenization.py",
    ),
    "prompt embeds": (
        _CHAT + "chat_completion_with_prompt_embeds.py",
        "openai/completion/test_completion_with_prompt_embeds.py",
    ),
    "reasoning": (_CHAT + "include_reasoning.py", _CHAT + "thinking_token_budget.py"),
    "function calls": (_CHAT + "completion_with_function_calling.py",),
    "tool parsers": ("tool_parsers/test_hermes_tool_parser.py", "tool_parsers/test_granite4_tool_parser.py"),
    "responses": (
        "openai/responses/test_basic.py",
        "openai/responses/test_function_call.py",
        "openai/responses/test_simple.py",
        "openai/responses/test_stateful.py",
        "openai/responses/test_structured_output.py",
    ),
    "messages": ("anthropic/test_messages.py",),
    "server": (
        "openai/models/test_models.py",
        "serve/instrumentator/test_basic.py",
        "serve/instrumentator/test_metrics.py",
        "serve/instrumentator/test_orca_metrics.py",
        "serve/instrumentator/test_uds.py",
    ),
    "adapters": ("serve/lora/test_lora_adapters.py",),
    "SageMaker": (
        "serve/sagemaker/test_sagemaker_handler_overrides.py",
        "serve/sagemaker/test_sagemaker_lora_adapters.py",
        "serve/sagemaker/test_sagemaker_middleware_integration.py",
        "serve/sagemaker/test_sagemaker_stateful_sessions.py",
    ),
}

_THOUGHT = "<think>The user asks for something.</think>"


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


_WEATHER = _call("get_current_weather", '{"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}')
_IN = '{"location": "Berlin"}'
_EVENT = '{"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}'
ANSWERS: dict[str, tuple[str, ...]] = {
    "anthropic/*::test_anthropic_tool_call*": (_call("get_current_weather", '{"location": "New York"}'),),
    "anthropic/*": ("I am fine.",),
    "openai/chat_completion/*::test_function_tool_use*": (_THOUGHT + _WEATHER,),
    "openai/chat_completion/*::test_no_args_tool_call*": (_call("get_current_time", "{}"), "It is noon."),
    "openai/chat_completion/test_include_reasoning.py*": (_THOUGHT + "4",),
    "openai/chat_completion/*::test_complex_message_content*": ("2",),
    "openai/responses/*::test_simple_input*": (_THOUGHT + "It is 312.",),
    "openai/responses/*::test_instructions*": (_THOUGHT + "It is 312. QED",),
    "openai/responses/*::test_chat[*": (_THOUGHT + "30. QED",),
    "openai/responses/*::test_chat": (_THOUGHT + "30. QED",),
    "openai/responses/*::test_function_tool_use*": (_THOUGHT + _WEATHER,),
    "openai/responses/*expected_arguments*": (_THOUGHT + _call("get_weather", _IN) + _call("get_time", _IN),),
    "openai/responses/*forced_tool_choice*": (_THOUGHT + _call("get_weather", _IN),),
    "openai/responses/*streaming_types*": (_THOUGHT + _WEATHER,),
    "openai/responses/*::test_named_tool_use*": (
        _THOUGHT + _call("get_weather", '{"latitude": 48.8, "longitude": 2.3}'),
        _THOUGHT + "It is 20 degrees.",
    ),
    "openai/responses/*::test_structured_output*": (_THOUGHT + _EVENT,),
    "openai/responses/*::test_previous_response_id*": (_THOUGHT + "Mark",),
    "openai/responses/*::test_two_responses_with_same_prev_id*": (_THOUGHT + "John",),
    "openai/test_return_token_ids.py::*tool_use*": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>',
    ),
    "openai/test_return_token_ids.py::*comparison*": ("One, two, three, four, five, six, seven, eight, nine, ten. " * 2,),
    "serve/lora/*replaces_inplace*": ("Meow Meow Meow", "Woof Woof Woof"),
    "openai/responses/*::test_max_tokens[*": (_THOUGHT + "Call me Ishmael. Some years ago, never mind how long. " * 4,),
    "openai/responses/*": (_THOUGHT + "Once upon a time there was a cat.",),
}

NOT_OURS: dict[str, str] = {}

DIFFERENCES: dict[str, str] = {}
