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
    "images": (
        "multimodal/openai/chat_completion/test_vision.py",
        "multimodal/openai/responses/test_image.py",
    ),
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


def _employee(name: str, age: int) -> str:
    return f'{{"name": "{name}", "age": {age}, "skills": ["C", "Go", "SQL"], "work_history": []}}'


_WEATHER = _call("get_current_weather", '{"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}')
_LONG = "One, two, three, four, five, six, seven, eight, nine, ten. " * 2
_IN = '{"location": "Berlin"}'
_EVENT = '{"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}'
ANSWERS: dict[str, tuple[str, ...]] = {
    "anthropic/*::test_anthropic_tool_call*": (_call("get_current_weather", '{"location": "New York"}'),),
    "anthropic/*": ("I am fine.",),
    "openai/chat_completion/*::test_function_tool_use*": (_THOUGHT + _WEATHER,),
    "tool_parsers/*product_tool_call*": (_call("get_product_info", '{"product_id": 7355608, "inserted": true}'),),
    "tool_parsers/*": (_call("get_current_weather", '{"location": "Boston, MA"}'),),
    "openai/chat_completion/*::test_no_args_tool_call*": (_call("get_current_time", "{}"), "It is noon."),
    "openai/chat_completion/test_include_reasoning.py*": (_THOUGHT + "4",),
    "openai/chat_completion/*::test_structured_outputs_choice_chat": ("Python", "Java"),
    "openai/chat_completion/*::test_structured_outputs_json_chat": (_employee("Ann", 30), _employee("Bob", 40)),
    "openai/chat_completion/*::test_response_format_json_object": ('{"result": 2}',),
    "openai/chat_completion/*::test_response_format_json_schema": ("It is 2.", "It is 2.", '{"result": 2}'),
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
    "openai/completion/*::test_completion_streaming*": (_LONG,),
    "openai/completion/*with_prompt_embeds*": (_LONG,),
    "openai/test_return_token_ids.py::*tool_use*": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>',
    ),
    "openai/test_return_token_ids.py::*comparison*": (_LONG,),
    "*::test_chat_completion_with_orca_header*": ("It is 2.",),
    "serve/lora/*replaces_inplace*": ("Meow Meow Meow", "Woof Woof Woof"),
    "openai/responses/*::test_max_tokens[*": (_THOUGHT + "Call me Ishmael. Some years ago, never mind how long. " * 4,),
    "openai/responses/*": (_THOUGHT + "Once upon a time there was a cat.",),
}

_PHI = "counts tokens by the processor of Phi-3.5-vision"
NOT_OURS = {
    "*prompt_validation.py::test_load_prompt_embeds*": "tests vllm's own code: safe_load_prompt_embeds",
    "*::test_batched_echo*": "tests vllm's own code: OpenAIServingChatBatch",
    "*::test_batched_parser_receives*": "tests vllm's own code: OpenAIServingChatBatch",
    "tool_parsers/*granite4*": "needs Granite 4",
    "*test_metrics*multimodal*": "needs a vision model",
    "multimodal/openai/chat_completion/*::test_single_chat_session_image[*": _PHI,
    "multimodal/openai/chat_completion/*::test_single_chat_session_image_base64encoded[*": _PHI,
    "*::test_metrics_exist_run_batch": "tests vllm's own command: run-batch",
    "*test_basic*::test_request_cancellation*": "needs a model with a context of 10,100 tokens",
}

_BEAM = "beam search is refused (501)"
_TEXT_OF_ERROR = "the error is told in other words"
_PATH = "answers do not tell paths of the server, only names of folders"
_NOT_500 = "404 or 400 for files that are missing or not valid, where vLLM says 500"
_OWN_USAGE = "usage always has prompt_tokens_details"
DIFFERENCES = {
    "multimodal/*beamsearch*": _BEAM,
    "multimodal/*::test_completions_with_image_with_uuid*": "an image is not found by an earlier request's uuid (400)",
    "openai/completion/*::test_batch_completions*": _BEAM,
    "serve/lora/*beam_search*": _BEAM,
    "*::test_kv_transfer*": "KV is not handed over by clients: kv_transfer_params is refused (501)",
    "*::test_single_chat_session*": _OWN_USAGE,
    "*orca_metrics*::test_single_completion*": _OWN_USAGE,
    "*::test_more_than_one_prompt_logprobs*": "passes only if the prompt's third token is the model's likeliest",
    "openai/chat_completion/*with_prompt_embeds*": "prompt_embeds are for completions, not for parts of messages",
    "*::test_completions_with_prompt_embeds*": "prompt and prompt_embeds in one request are refused (400); send two",
    "*::test_long_seed*": _TEXT_OF_ERROR,
    "*::test_prompt_logprobs_raises_error*": _TEXT_OF_ERROR,
    "*::test_chat_completion_n_parameter_non_streaming*": "depends on what is drawn for three choices",
    "*::test_thinking_token_budget*": "refused (400): the end of the default model's thoughts is not one token",
    "serve/lora/*badrequests*": _TEXT_OF_ERROR,
    "openai/responses/*::test_enable_response_messages*": "tokens of messages are refused (501); read input_items",
    "anthropic/*cache_usage*": "message_start tells cached tokens apart, as at Anthropic; all prompts are cached",
    "openai/models/*check_models*": _PATH,
    "serve/lora/*lineage*": _PATH,
    "serve/sagemaker/*load_adapter_happy_path*": _PATH,
    "*::test_metrics_counts*": "a step's tokens are those that it computes: not an answer's last, but those of drafts",
    "serve/lora/*does_not_break_others*": _NOT_500,
    "serve/*invalid_files*": _NOT_500,
    "*::test_show_version*": "the version is Lorikeet's",
}
