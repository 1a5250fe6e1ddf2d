"""Reads and writes the lines of OpenAI's batch files: requests and their answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from lorikeet.http.model_routes import BATCHABLE_PATHS

LONGEST_ID = 512
"""Characters of a ``custom_id``."""


class LineError(ValueError):
    """A line is not a valid request. The message begins with the line's number."""


class RequestLine(NamedTuple):
    """One request.

    Attributes:
        custom_id: the client's id of the request, which is repeated in the answer.
        url: the request's route.
        body: the request's body, a JSON object.
    """

    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Known(msgspec.Struct):
    custom_id: str


_LINE = msgspec.json.Decoder(_Line)
_ANSWER = msgspec.json.Decoder(_Known)


def read_request(line: bytes, number: int) -> RequestLine:
    """Parse a line of a file as a request.

    Raises:
        LineError: the line is not a valid request.
    """
    try:
        request = _LINE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(f"line {number}: {error}") from error
    if not 0 < len(request.custom_id) <= LONGEST_ID:
        raise LineError(f"line {number}: custom_id must have 1 to {LONGEST_ID} characters")
    if request.method != "POST":
        raise LineError(f"line {number}: method is {request.method[:20]!r}, and must be POST")
    body = bytes(request.body)
    if not body.startswith(b"{"):
        raise LineError(f"line {number}: body must be a JSON object")
    return RequestLine(request.custom_id, request.url, body)


class NumberedLine(NamedTuple):
    """A line that is not blank, without its line end, and its number, counted from 1."""

    number: int
    content: bytes


def numbered_lines(file: BinaryIO, max_bytes: int) -> Iterator[NumberedLine]:
    """Yield the lines of a file that are not blank.

    Raises:
        LineError: a line is longer than ``max_bytes``.
    """
    number = 0
    while line := file.readline(max_bytes + 2):
        number += 1
        content = line.strip()
        if len(content) > max_bytes:
            raise LineError(f"line {number}: longer than {max_bytes} bytes")
        if content:
            yield NumberedLine(number, content)


class FileSummary(msgspec.Struct):
    """Counts the requests of a checked file.

    Attributes:
        lines: number of requests.
        urls: number of the first line of each route.
    """

    lines: int = 0
    urls: dict[str, int] = {}


def check_requests(file: BinaryIO, max_requests: int, max_line_bytes: int) -> FileSummary:
    """Check that every line of a file is a valid request with a unique ``custom_id``.

    Raises:
        LineError: a line is not a valid request.
    """
    summary = FileSummary()
    ids = dict[str, int]()
    for number, content in numbered_lines(file, max_line_bytes):
        request = read_request(content, number)
        if (other := ids.setdefault(request.custom_id, number)) != number:
            raise LineError(f"line {number}: custom_id {request.custom_id[:100]!r} is already used by line {other}")
        if summary.lines == max_requests:
            raise LineError(f"line {number}: a file may have {max_requests} requests")
        summary.lines += 1
        if request.url not in summary.urls:
            # The limit keeps memory small for a file with many different invalid routes.
            if len(summary.urls) == len(BATCHABLE_PATHS) + 1:
                raise LineError(f"line {number}: {request.url[:100]!r} must be one of {', '.join(BATCHABLE_PATHS)}")
            summary.urls[request.url] = number
    if not summary.lines:
        raise LineError("the file has no requests")
    return summary


def answered(path: Path) -> set[str]:
    """Return the ``custom_id`` of every answer in a file; an empty set if the file does not exist.

    Raises:
        ValueError: a line is not an answer.
    """
    if not path.exists():
        return set()
    with path.open("rb") as file:
        return {_ANSWER.decode(line).custom_id for line in file}


def answer_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line for an answer. The line of a failed request also has the error."""
    response = {"status_code": status, "request_id": request_id, "body": _raw(body)}
    error = None if status < 400 else _error_in(body)
    line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line for a request without an answer."""
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": line_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def _raw(body: bytes) -> Any:
    """Return a body unchanged if it is JSON on one line; otherwise return its text as a JSON string."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    return msgspec.json.decode(body) if b"\n" in body else msgspec.Raw(body)


def _error_in(body: bytes) -> dict[str, str]:
    try:
        error = msgspec.json.decode(body)["error"]
        return {"code": str(error["type"]), "message": str(error["message"])}
    except (msgspec.DecodeError, KeyError, TypeError):
        return {"code": "error", "message": body.decode(errors="replace")[:1000]}
