"""OpenAI's own client, unchanged."""

import openai
import pytest

from tests.support.api_server import Running


@pytest.fixture
def client(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", max_retries=0)


async def test_openais_client_lists_chats_and_streams(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["base", "formal"]
    whole = await client.chat.completions.create(
        model="formal", messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=1
    )
    assert whole.choices[0].message.content == "hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    stream = await client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def test_openais_client_completes(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="base", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["hello world"] * 2


async def test_openai_client_raises_its_error_types(client: openai.AsyncOpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nobody` does not exist"):
        await client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="base", prompt="x", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    server.engine.dies_after = 1
    stream = await client.completions.create(model="base", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in stream:
            pass


@pytest.mark.slow
async def test_openais_client_creates_streams_and_reads_responses(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="formal", input="hello")
    assert whole.output_text == "hello world"
    assert (await client.responses.retrieve(whole.id)).output_text == "hello world"
    async with client.responses.stream(model="base", input="hello", previous_response_id=whole.id) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == "hello world"
    assert kinds[0] == "response.created"
    items = [item async for item in client.responses.input_items.list(whole.id)]
    assert [item.type for item in items] == ["message"]
    await client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(whole.id)
