"""What programs written for OpenAI do, over the base and adapters: ``python use_openai.py URL MODEL...``.

Runs in an environment of its own, with nothing of Lorikeet in it.
"""

import json
import sys

import openai


def main() -> None:
    """Use every call that the server answers now; any surprise is an exception."""
    url, *models = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    listed = [model.id for model in client.models.list()]
    assert set(models) <= set(listed), listed
    assert client.models.retrieve(models[-1]).id == models[-1]
    answers = {model: use(client, model) for model in models}
    try:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "hi"}])
        refusal = "none"
    except openai.NotFoundError as error:
        refusal = str(error)
    assert "does not exist" in refusal, refusal
    print(json.dumps({"version": openai.__version__, "answers": answers}))


def use(client: openai.OpenAI, model: str) -> str:
    """One chat, streamed and not, with usage and log probabilities, and one completion with several choices."""
    messages = [{"role": "user", "content": "What is a lorikeet?"}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 24}
    client.chat.completions.create(**options)  # leaves the prompt's beginning in KV, so that all others compute alike
    plain = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    text = plain.choices[0].message.content
    assert text
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert len(plain.choices[0].logprobs.content) == plain.usage.completion_tokens

    streamed, usage = "", None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert streamed == text, (streamed, text)
    assert usage.completion_tokens == plain.usage.completion_tokens

    several = client.completions.create(
        model=model, prompt="Birds are", n=2, max_tokens=8, temperature=1.0, seed=1, stop=["\n"]
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    return text


main()
