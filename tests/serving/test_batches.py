"""Files and batches, with OpenAI's own client."""

import asyncio
import json
from typing import Any

import openai
import pytest

from lorikeet.core.request import Request
from tests.support.api_server import Running, Start
from tests.support.batch_lines import MESSAGES, line
from tests.support.fakes import HIDDEN
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def client_of(server: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key=key, max_retries=0)


async def submitted(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = "/v1/chat/completions") -> Any:
    file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def found() -> Any:
        batch = await client.batches.retrieve(batch_id)
        return None if batch.status in ("in_progress", "cancelling") else batch

    return await until(found, "the batch has ended")


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their ids, each of which must be there once."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


async def test_a_batch_over_base_and_adapters_is_answered_line_by_line(server: Running) -> None:
    client = client_of(server)
    content = b"".join(
        line(name, {"messages": MESSAGES, "model": model})
        for name, model in (("a", "base"), ("b", "formal"), ("c", "nobody"), ("d", "base:formal"))
    )
    content += (
        line("e", {"messages": MESSAGES, "max_tokens": -1}) + b"\n" + line("f", {"messages": MESSAGES, "stream": True})
    )
    batch = await submitted(client, content)
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/chat/completions", "24h")
    done = await ended(client, batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 3, 3)
    good = await answers(client, done.output_file_id)
    assert {name: each["response"]["body"]["model"] for name, each in good.items()} == {
        "a": "base",
        "b": "formal",
        "d": "formal",
    }
    body = good["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["error"] is None
    bad = await answers(client, done.error_file_id)
    assert {name: each["response"]["status_code"] for name, each in bad.items()} == {"c": 404, "e": 400, "f": 400}
    assert bad["c"]["error"] == {"code": "NotFoundError", "message": "The model `nobody` does not exist."}
    assert "stream" in bad["f"]["error"]["message"]
    assert all(request.background for request in server.engine.submitted)
    assert [each.id async for each in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/responses", {"input": "a", "model": "formal"})],
)
async def test_batches_have_completions_and_responses(server: Running, endpoint: str, body: dict[str, Any]) -> None:
    client = client_of(server)
    batch = await submitted(client, line("x", body, endpoint), endpoint)
    done = await ended(client, batch.id)
    answer = (await answers(client, done.output_file_id))["x"]["response"]["body"]
    assert "hello world" in json.dumps(answer)
    assert server.service.responses.number == 0


async def test_a_batch_may_be_of_embeddings(server: Running) -> None:
    client = client_of(server)
    batch = await submitted(client, line("x", {"model": "formal", "input": "a"}, "/v1/embeddings"), "/v1/embeddings")
    done = await ended(client, batch.id)
    answer = (await answers(client, done.output_file_id))["x"]["response"]["body"]
    assert len(answer["data"][0]["embedding"]) == HIDDEN
    assert server.engine.submitted[-1].background


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (line("a") + b"{\n", "line 2: "),
        (line("a") + b'{"custom_id": "b", "url": "/v1/completions"}\n', "line 2: Object missing required field `body`"),
        (line("a") + line("a"), "line 2: custom_id 'a' is already used by line 1"),
        (line("a") + line(""), "line 2: custom_id must have 1 to 512 characters"),
        (line("a") + line("b", method="GET"), "line 2: method is 'GET', and must be POST"),
        (line("a") + line("b")[:-2].replace(b'{"messages"', b'[], "x": {"messages"') + b"}\n", "line 2: body must be"),
        (b"\n", "the file has no requests"),
        (b"\xff\n", "line 1: "),
    ],
)
async def test_a_wrong_file_is_refused_with_the_line(server: Running, content: bytes, said: str) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match=said.replace("(", r"\(")) as caught:
        await client.files.create(file=content, purpose="batch")
    assert caught.value.param == "file"
    assert [each async for each in client.files.list()] == []


async def test_files_are_listed_read_and_deleted(server: Running) -> None:
    client = client_of(server)
    files = [await client.files.create(file=(f"{n}.jsonl", line(str(n))), purpose="batch") for n in range(3)]
    assert [each.id async for each in client.files.list(limit=2)] == [each.id for each in files[::-1]]
    assert [each.id async for each in client.files.list(order="asc", after=files[0].id)] == [f.id for f in files[1:]]
    assert [each.id async for each in client.files.list(purpose="batch_output")] == []
    found = await client.files.retrieve(files[0].id)
    assert (found.filename, found.bytes, found.purpose) == ("0.jsonl", len(line("0")), "batch")
    assert (await client.files.content(files[0].id)).content == line("0")
    assert (await client.files.delete(files[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(files[0].id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=line("x"), purpose="fine-tune")


async def test_one_keys_files_and_batches_do_not_exist_for_another(start: Start) -> None:
    async with start(api_keys=("one", "two")) as server:
        one = client_of(server, "one")
        two = client_of(server, "two")
        batch = await submitted(one, line("x"))
        done = await ended(one, batch.id)
        for call in (
            two.batches.retrieve(batch.id),
            two.batches.cancel(batch.id),
            two.files.retrieve(batch.input_file_id),
            two.files.content(done.output_file_id),
            two.files.delete(batch.input_file_id),
            two.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each async for each in two.files.list()] == []
        assert [each async for each in two.batches.list()] == []
        assert len([each async for each in one.files.list()]) == 2
        assert server.engine.submitted[0].tenant.startswith("key-")


async def test_limits_are_kept(start: Start) -> None:
    limits = {"max_file_bytes": 400, "max_requests": 2, "max_files": 3, "storage_bytes": 600}
    async with start(batches=limits) as server:
        client = client_of(server)
        with pytest.raises(openai.BadRequestError, match="line 3: a file may have 2 requests"):
            await client.files.create(file=line("a") + line("b") + line("c"), purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=line("a" * 300), purpose="batch")
        assert caught.value.status_code == 413
        first = await client.files.create(file=line("a" * 200), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="storage for batches is full: there is no space"):
            await client.files.create(file=line("a" * 200), purpose="batch")
        for _ in range(2):
            await client.files.create(file=line("a")[:-1], purpose="batch")
        with pytest.raises(openai.InternalServerError, match="3 files and batches are stored"):
            await client.batches.create(
                input_file_id=first.id, endpoint="/v1/chat/completions", completion_window="24h"
            )


async def test_files_and_batches_expire(start: Start) -> None:
    async with start() as server:
        client = client_of(server)
        batch = await ended(client, (await submitted(client, line("x"))).id)
        storage = server.service.batches.storage
        later = storage._now() + storage.settings.keep_s + 1
        storage._now = lambda: later
        assert [each async for each in client.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.output_file_id)
        assert [each async for each in client.batches.list()] == []
        assert [path.name for path in storage.folder.iterdir()] == ["lock"]


async def test_a_cancelled_batch_keeps_its_answers_and_frees_the_engine(start: Start) -> None:
    async with start(batches={"concurrency": 2}) as server:
        client = client_of(server)
        engine = server.engine
        engine.open.clear()
        batch = await submitted(client, b"".join(line(str(index)) for index in range(200)))
        await until(lambda: len(engine.submitted) == 2, "two lines are in flight")
        with pytest.raises(openai.ConflictError, match="needs the file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await ended(client, batch.id)
        assert done.status == "cancelled"
        assert len(engine.submitted) == len(engine.aborted) == 2
        bad = await answers(client, done.error_file_id)
        assert len(bad) == done.request_counts.failed == 200
        assert bad["7"]["error"]["code"] == "batch_cancelled"
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


async def test_a_batch_that_takes_too_long_expires(start: Start) -> None:
    async with start(batches={"concurrency": 1}) as server:
        client = client_of(server)
        engine = server.engine
        engine.open.clear()
        batch = await submitted(client, line("a") + line("b"))
        await until(lambda: len(engine.submitted) == 1, "a line is in flight")
        server.service.batches.runner._now = lambda: batch.expires_at
        engine.open.set()
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("expired", 1)
        assert (await answers(client, done.error_file_id))["b"]["error"]["code"] == "batch_expired"


async def test_a_restarted_server_computes_no_line_twice(start: Start) -> None:
    async with start(batches={"concurrency": 4}) as server:
        client = client_of(server)
        engine = server.engine
        script = engine.script

        def stop_at_the_tenth(request: Request) -> list[int]:
            if len(engine.submitted) >= 10:
                engine.open.clear()
            return script(request)

        engine.script = stop_at_the_tenth
        batch = await submitted(client, b"".join(line(str(index)) for index in range(40)))
        await until(lambda: len(engine.submitted) >= 10, "some lines are in flight")
        await server.service.batches.close()
        storage = server.service.batches.storage
        output = storage.data_path(storage.batch("", batch.id).output_file_id)
        first = output.read_bytes().splitlines()
        assert 0 < len(first) < 40
        output.write_bytes(output.read_bytes() + b'{"custom_id": "half')
    async with start(batches={"concurrency": 4}) as server:
        client = client_of(server)
        engine = server.engine
        await server.service.batches.resume()
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 40)
        assert len(engine.submitted) == 40 - len(first)
        assert set(await answers(client, done.output_file_id)) == {str(index) for index in range(40)}


async def test_lines_are_retried_after_overload_or_a_lost_engine(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.serving.batches.runner._FIRST_PAUSE_S", 0.01)
    client = client_of(server)
    engine = server.engine
    engine.dies_after = 1
    batch = await submitted(client, line("x"))
    await until(lambda: len(engine.submitted) >= 2, "the line was tried again")
    engine.dies_after = None
    done = await ended(client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


async def test_the_requests_of_a_batch_take_no_place_of_others(start: Start) -> None:
    async with start(max_queued=2, batches={"concurrency": 2}) as server:
        client = client_of(server)
        engine = server.engine
        engine.open.clear()
        await submitted(client, b"".join(line(str(index)) for index in range(4)))
        await until(lambda: len(engine.submitted) == 2, "two lines are in flight")
        waiting = [asyncio.ensure_future(client.chat.completions.create(model="base", messages=MESSAGES)) for _ in "ab"]
        await until(lambda: len(engine.submitted) == 4, "two requests are in flight")
        engine.open.set()
        assert [each.choices[0].message.content for each in await asyncio.gather(*waiting)] == ["hello world"] * 2


async def test_a_second_server_leaves_the_folder_alone(start: Start) -> None:
    async with start() as first, start() as second:
        await client_of(first).files.create(file=line("x"), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="--batch-dir") as caught:
            await client_of(second).files.list()
        assert caught.value.status_code == 501


async def test_flex_requests_run_in_the_background(server: Running) -> None:
    client = client_of(server)
    await client.chat.completions.create(model="base", messages=MESSAGES, service_tier="flex")
    await client.chat.completions.create(model="base", messages=MESSAGES, service_tier="default")
    await client.responses.create(model="base", input="x", service_tier="flex")
    assert [each.background for each in server.engine.submitted] == [True, False, True]
