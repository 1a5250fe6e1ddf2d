"""Requests as nobody should send them: each gets an answer below 500, quickly and in little memory."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.support.api_server import Start
from tests.support.fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

FULL = ("too many", "full", "shutting down", "draining", "queue")
"""A 5xx may say one of these."""
NOT_SUPPORTED = 501
"""The status of what the API has and this server does not."""
ANSWER_S = 60.0
"""No answer may take so long, on however busy a machine."""


def check(fuzz: Fuzzing, http: httpx.Client, method: str, path: str, content: bytes | None, **options: Any) -> None:
    """Send a request and read its whole answer."""
    with fuzz.case(method, path, repr(content)[:2_000]):
        response = http.request(method, path, content=content, **options)
    fuzz.counts[f"answers {response.status_code // 100}xx"] += 1
    status = response.status_code
    said = response.text.lower()
    may_be = status < 500 or status == NOT_SUPPORTED or (status == 503 and any(word in said for word in FULL))
    assert may_be, f"{method} {path} {content!r:.2000}: {status} {response.text[:500]}"


async def while_serving(start: Start, run: Callable[[httpx.Client, dict[str, Any]], None]) -> None:
    """Let a server answer while ``run`` sends it requests from another thread; it must be well afterwards."""
    async with start() as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        schema = (await server.http.get("/openapi.json")).json()
        with httpx.Client(base_url=server.http.base_url, timeout=ANSWER_S) as http:
            await asyncio.to_thread(run, http, schema)
        assert (await server.http.get("/health")).status_code == 200
        assert server.service.gate.active == 0


async def test_requests_by_the_schema(start: Start, fuzz: Fuzzing) -> None:
    """Requests that follow the server's own description, and others that break it in one place."""

    def run(http: httpx.Client, schema: dict[str, Any]) -> None:
        operations = [found.ok() for found in schemathesis.openapi.from_dict(schema).get_all_operations()]
        # After one, requests wait; the other never ends.
        operations = [each for each in operations if each.path not in ("/pause", "/v1/stats/stream")]
        assert sum(bool(operation.body) for operation in operations) >= 10, "bodies are described"
        with_body = [operation for operation in operations if operation.body]
        cases = [
            operation.as_strategy(generation_mode=mode)
            for operation in (*operations, *with_body * 3)  # the others hardly differ from case to case
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        ]

        @fuzz.settings(few=120)
        @given(st.one_of(cases))
        def send(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url=str(http.base_url))
            content = sent.get("data")
            if "json" in sent:
                content = json.dumps(sent["json"]).encode()
            headers = {name: value for name, value in (sent.get("headers") or {}).items() if value.isascii()}
            with contextlib.suppress(httpx.LocalProtocolError, httpx.InvalidURL, ValueError, TypeError):
                check(fuzz, http, sent["method"], sent["url"], content, headers=headers, params=sent.get("params"))

        send()

    await while_serving(start, run)


# --- bodies by hand ----------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-3, 300), st.floats(), st.sampled_from((2**31, 2**63, -(2**63), 10**30, 0.0, 1e308)))
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(("hello", "", "\x00", "\ud800", "<|im_end|>", "{{ x }}", "🦜" * 500, "a" * 30_000, "é" * 3_000)),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)
SMALL = st.sampled_from((None, True, 1, -1, 1.5, "a", "", [], [1], ["a"], {}, {"role": "user", "content": "a"}))
MANY = st.builds(lambda each, count: [each] * count, SMALL, st.sampled_from((2, 65, 1_025, 20_000)))
NAMES = st.sampled_from(("f", "g", "a b")) | TEXTS
SCHEMAS = st.fixed_dictionaries(
    {"type": st.sampled_from(("object", "string")) | VALUES},
    optional={
        "properties": VALUES | st.dictionaries(TEXTS, VALUES | st.fixed_dictionaries({"type": st.just("string")})),
        "required": VALUES | st.lists(TEXTS),
        "$defs": VALUES,
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(("function", "x")),
            "function": st.fixed_dictionaries(
                {"name": NAMES}, optional={"parameters": SCHEMAS, "strict": st.booleans()}
            ),
        }
    ),
    max_size=3,
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": NAMES, "arguments": TEXTS | VALUES})}), max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "system", "assistant", "developer", "tool", "", "x" * 5_000)) | VALUES},
        optional={
            "content": TEXTS | VALUES | st.lists(st.fixed_dictionaries({"type": TEXTS, "text": TEXTS}), max_size=3),
            "tool_calls": CALLS | VALUES,
            "reasoning": VALUES,
        },
    ),
    max_size=4,
)
FIELDS = {
    "model": st.sampled_from(("base", "formal", "none", "")) | VALUES,
    "max_tokens": NUMBERS,
    "n": NUMBERS,
    "stream": st.booleans() | VALUES,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | VALUES,
    "stop": TEXTS | st.lists(TEXTS, max_size=5) | MANY,
    "stop_token_ids": st.lists(NUMBERS, max_size=5) | MANY,
    "logit_bias": st.dictionaries(TEXTS | st.sampled_from(("1", "-1", "99999999999")), NUMBERS, max_size=5),
    "seed": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": NUMBERS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "min_tokens": NUMBERS,
    "logprobs": NUMBERS | st.booleans(),
    "top_logprobs": NUMBERS,
    "echo": st.booleans(),
    "chat_template_kwargs": st.dictionaries(TEXTS, VALUES, max_size=3),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "tools": TOOLS | VALUES,
    "tool_choice": st.sampled_from(("auto", "none", "required")) | VALUES,
    "response_format": VALUES,
    "priority": NUMBERS,
    "user": TEXTS | VALUES,
}
OWN_FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/completions": {"prompt": TEXTS | st.lists(TEXTS | NUMBERS, max_size=5) | MANY | VALUES},
    "/v1/chat/completions": {"messages": MESSAGES | MANY | VALUES},
    "/v1/responses": {
        "input": TEXTS | MESSAGES | MANY | VALUES,
        "instructions": TEXTS | VALUES,
        "tool_choice": TEXTS | VALUES,
        "text": st.fixed_dictionaries({"format": VALUES}) | VALUES,
        "previous_response_id": TEXTS | VALUES,
        "background": st.booleans() | VALUES,
    },
    "/v1/messages": {
        "messages": MESSAGES | MANY | VALUES,
        "system": TEXTS | MESSAGES | VALUES,
        "tool_choice": st.fixed_dictionaries({"type": TEXTS}) | VALUES,
        "stop_sequences": st.lists(TEXTS, max_size=5) | VALUES,
        "thinking": st.fixed_dictionaries({"type": TEXTS}) | VALUES,
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES | MANY | VALUES, "system": TEXTS | VALUES},
    "/tokenize": {"prompt": TEXTS | VALUES, "messages": MESSAGES | VALUES},
    "/detokenize": {"tokens": st.lists(NUMBERS, max_size=20) | MANY | VALUES},
    "/v1/adapters": {"name": TEXTS | VALUES, "source": TEXTS | VALUES, "replace": st.booleans()},
    "/v1/load_lora_adapter": {"lora_name": TEXTS | VALUES, "lora_path": TEXTS | VALUES},
    "/v1/unload_lora_adapter": {"lora_name": TEXTS | VALUES},
    "/v1/loras": {"lora_name": TEXTS | VALUES, "source": st.fixed_dictionaries({"uri": TEXTS}) | VALUES},
}

FITTING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "model": "base"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "model": "formal"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    "/tokenize": {"prompt": "hello"},
}
"""Fields that will do, so that the others are looked at."""


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a path, and a body whose fields are wrong or odd; it may be no JSON, deep, or in another encoding."""
    path = draw(st.sampled_from(sorted(OWN_FIELDS)))
    body = {name: draw(values) for name, values in OWN_FIELDS[path].items() if draw(st.integers(0, 9))}
    if draw(st.booleans()):
        body |= FITTING.get(path, {})
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True)):
        body[name] = draw(FIELDS[name])
    if not draw(st.integers(0, 4)):
        body[draw(st.text(max_size=9))] = draw(VALUES | MANY)
    text = json.dumps(body, ensure_ascii=draw(st.booleans()))
    content = text.encode(errors="surrogatepass")
    match draw(st.integers(0, 11)):
        case 0:
            at = draw(st.integers(0, len(content)))
            return path, content[:at] + draw(st.binary(max_size=5)) + content[at:]
        case 1:
            return path, content[: draw(st.integers(0, len(content)))]
        case 2:
            deep = draw(st.sampled_from((100, 950, 5_000, 100_000)))
            opening, closing = draw(st.sampled_from((("[", "]"), ('{"a":', "}"))))
            return path, content[:-1] + f', "x": {opening * deep}1{closing * deep}}}'.encode()
        case 3:
            return path, text.encode(draw(st.sampled_from(("utf-16", "utf-8-sig", "utf-32"))), errors="replace")
        case 4:
            keys = ", ".join(f'"k{number}": {number}' for number in range(draw(st.sampled_from((10, 20_000)))))
            return path, content[:-1] + f", {keys}}}".encode()
    return path, content


async def test_bodies(start: Start, fuzz: Fuzzing) -> None:
    types = (
        "application/json",
        "text/plain",
        "application/json; charset=latin-1",
        "application/x-www-form-urlencoded",
        "",
    )

    def run(http: httpx.Client, schema: dict[str, Any]) -> None:
        assert OWN_FIELDS.keys() <= schema["paths"].keys()

        @fuzz.settings(few=150)
        @given(bodies(), st.sampled_from(types[:1] * 9 + types))
        def send(body: tuple[str, bytes], content_type: str) -> None:
            path, content = body
            check(fuzz, http, "POST", path, content, headers={"content-type": content_type})

        send()

    await while_serving(start, run)


# --- HTTP itself -------------------------------------------------------------------------------------

TOKENS = st.one_of(
    st.sampled_from(
        (b"GET", b"POST", b"/health", b"/v1/models", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9", b"PRI * HTTP/2.0")
    ),
    st.binary(max_size=12),
)
HEADERS = st.one_of(
    st.sampled_from(
        (
            b"Host: localhost",
            b"Content-Length: 5",
            b"Content-Length: -1",
            b"Content-Length: 99999999999999999999",
            b"Content-Length: 5, 6",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Expect: 100-continue",
            b"Upgrade: websocket",
            b"Upgrade: h2c",
            b"Connection: close, upgrade",
            b"Authorization: Bearer \xff",
            b"Origin: http://evil.example",
            b"X-Request-Id: " + b"a" * 3_000,
            b"Content-Type: application/json",
            b"Cookie: " + b"a=b; " * 500,
            b" folded",
            b":",
        )
    ),
    st.binary(max_size=30),
)
ENDS = st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"))
TAILS = st.one_of(
    st.binary(max_size=50),
    st.sampled_from(
        (b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\nx", b"-1\r\n", b"5;a=b\r\nhello\r\n", b"{}")
    ),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Return what may be taken for an HTTP request."""
    line = b" ".join(draw(st.lists(TOKENS, min_size=1, max_size=4)))
    if draw(st.booleans()):
        path = draw(
            st.sampled_from((b"/health", b"/v1/completions", b"/v1/adapters/%2e%2e%2f", b"/%00", b"//", b"*", b"/\xff"))
        )
        line = b"%s %s HTTP/1.1" % (
            draw(st.sampled_from((b"GET", b"POST", b"DELETE", b"OPTIONS", b"TRACE", b"X"))),
            path,
        )
    lines = [line, *draw(st.lists(HEADERS, max_size=6))]
    head = b"".join(part + draw(ENDS) for part in lines)
    return head + draw(ENDS) + draw(TAILS)


async def test_random_bytes_do_not_break_the_server(start: Start, fuzz: Fuzzing) -> None:
    def run(http: httpx.Client, schema: dict[str, Any]) -> None:
        address = urlsplit(str(http.base_url))

        @fuzz.settings(few=150)
        @given(messages())
        def send(data: bytes) -> None:
            with fuzz.case(repr(data)), socket.create_connection((address.hostname, address.port), ANSWER_S) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while part := client.recv(65536):
                        answer += part
            status = answer[9:12]
            fuzz.counts[f"answers {status[:1].decode()}xx" if status else "closed connections"] += 1
            assert not status.startswith(b"5") or status in (b"501", b"505"), answer[:500]

        send()

    await while_serving(start, run)
