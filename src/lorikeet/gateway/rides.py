"""A request on its way through a gateway, as its own task and the owner of the dispatcher share it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.gateway.adapters import KnownAdapter
from lorikeet.gateway.backends import Backend
from lorikeet.gateway.questions import Question
from lorikeet.server.errors import ApiError

MOST_LOSSES = 3
"""A request is given up when its backend has been lost so many times: it may be what ends them."""

_T = TypeVar("_T")


class Lost(Exception):
    """The backend of a request is gone, or does not take it; the request must be placed again."""


class Ride:
    """One request, from its arrival to the end of its answer.

    Args:
        request_id: unique among all requests of the gateway.
        question: its body.
        adapter: that it asks for, None for the base model.
        prompt_tokens: of its prompt, counted or guessed.

    Attributes:
        placed: done as soon as a backend has been found and has the adapter.
        backend: where it is, or was last.
        failed_at: backends that have failed it, which are avoided while another is open.
        output_tokens: that earlier backends have given.
        is_known: the dispatcher counts it.
        is_started: its backend has given a token since it was placed.
    """

    placed: "asyncio.Future[Backend]"

    def __init__(
        self, request_id: RequestId, question: Question, adapter: KnownAdapter | None, prompt_tokens: int
    ) -> None:
        self.request_id = request_id
        self.question = question
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.backend: Backend | None = None
        self.failed_at: set[ReplicaId] = set()
        self.output_tokens = 0
        self.is_known = False
        self.is_started = False
        self._losses = 0
        self._is_lost = False
        self._scope: asyncio.Timeout | None = None

    def begin(self) -> None:
        """It is to be placed, perhaps once more."""
        self.placed = asyncio.get_running_loop().create_future()
        self._is_lost = self.is_started = False

    def count_loss(self) -> None:
        """Its backend was lost while it answered, or was asked to load the adapter.

        Raises:
            ApiError: that has happened too often.
        """
        self._losses += 1
        if self._losses == MOST_LOSSES:
            raise ApiError(502, f"The backend of this request was lost, {MOST_LOSSES} times: it is given up.")

    def lose(self) -> None:
        """Its backend is gone: whatever it waits for from there ends with ``Lost``."""
        if not self._is_lost:
            self._is_lost = True
            if self._scope is not None:
                self._scope.reschedule(0.0)

    async def unless_lost(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Wait for something from its backend.

        Raises:
            Lost: the backend is gone; the work was cancelled.
        """
        if self._is_lost:
            raise Lost
        try:
            async with asyncio.timeout(None) as self._scope:
                return await work()
        except TimeoutError:
            if not self._is_lost:
                raise
            raise Lost from None
        finally:
            self._scope = None
