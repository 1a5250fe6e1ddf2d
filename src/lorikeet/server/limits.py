"""What the server refuses before it looks at a request: too many, too large, or too late."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.server.errors import ApiError

_RETRY_AFTER_S = 1


class Gate:
    """Counts accepted sequences and closes for a drain.

    Args:
        max_queued: sequences accepted and not finished, beyond which new ones are refused.
    """

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.active = 0
        self.draining = False

    def enter(self, sequences: int) -> "Ticket":
        """Accept a request of that many sequences.

        Raises:
            ApiError: 503 while draining, 429 if too many are under way, 400 if it could never be accepted.
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down and takes no new requests.", headers={"Retry-After": "5"})
        if sequences > self.max_queued:
            raise ApiError(400, f"The request asks for {sequences} answers; at most {self.max_queued} are allowed.")
        if self.active + sequences > self.max_queued:
            raise ApiError(
                429,
                f"{self.active} requests are under way, and at most {self.max_queued} are accepted; try again later.",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        return Ticket(self, sequences)


class Ticket:
    """A place among the accepted requests, given back once."""

    def __init__(self, gate: Gate, sequences: int) -> None:
        self._gate = gate
        self._sequences = sequences
        gate.active += sequences

    def release(self) -> None:
        """Give the place back; a second call does nothing."""
        self._gate.active -= self._sequences
        self._sequences = 0


class BodyLimit:
    """Refuses bodies above a size with 413, by their announced length or while they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.")
