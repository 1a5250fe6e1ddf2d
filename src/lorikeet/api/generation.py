"""Runs one HTTP request: its sequences go to the engine, pieces of text come back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from lorikeet.api.errors import ApiError, engine_unavailable, hide_paths, unexpected_failure
from lorikeet.api.logs import log
from lorikeet.api.observer import RequestObserver, RequestWatch
from lorikeet.api.text_processor import StopScanner, TextProcessor
from lorikeet.client.client import Engines, RequestHandle, RequestOutput
from lorikeet.client.supervisor import EngineError
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.plan import Token
from lorikeet.core.request import Request

_READ_S = 10.0
"""How long after the time-out a client may take to read its answer; then its place is free."""


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text.

    Attributes:
        stops: stop strings.
        include_stop: whether what stopped the answer (string or token) stays in the text.
        skip_special_tokens: leave tokens such as end of text out.
        named_stop_tokens: stop tokens that the client named, as opposed to the model's own.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    named_stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one output of the engine added to one choice.

    Attributes:
        index: the choice's.
        text: may be empty while characters or stop strings are incomplete.
        tokens: those that brought it.
        finish_reason: ``stop``, ``length`` or ``abort`` with the last piece, else None.
        stop_reason: the stop string or the named stop token that ended it.
        completion_tokens: generated so far.
    """

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    completion_tokens: int


class ActiveChoice:
    """One answer under way: the engine's handle and what its tokens have become."""

    def __init__(
        self, index: int, handle: RequestHandle, watch: RequestWatch, texts: TextProcessor, options: TextOptions
    ) -> None:
        self.index = index
        self.handle = handle
        self.watch = watch
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._options = options
        self._sampling = handle.request.sampling
        self._stop_tokens = frozenset(self._sampling.stop_token_ids)
        prompt = handle.request.prompt_token_ids
        self._stream = texts.stream(prompt, skip_special_tokens=options.skip_special_tokens)
        self._scanner = StopScanner(options.stops, include=options.include_stop)

    def take(self, output: RequestOutput) -> OutputDelta:
        """Turn one output of the engine into a piece; a stop string ends the choice and aborts the handle.

        Raises:
            ApiError: the engine reports that the request failed.
        """
        text = ""
        taken = 0
        for token in output.tokens:
            if self.finish_reason is not None:
                break
            taken += 1
            self.completion_tokens += 1
            text += self._read(token.token_id)
        if output.finished is not None and self.finish_reason is None:
            text += self._end(output.finished)
        return OutputDelta(
            self.index,
            text,
            output.tokens[:taken],
            self.finish_reason,
            self.stop_reason,
            self.completion_tokens,
        )

    def _read(self, token_id: int) -> str:
        may_stop = self.completion_tokens > self._sampling.min_tokens
        if may_stop and token_id in self._stop_tokens and not self._options.include_stop:
            return ""
        return self._scan(self._stream.push(token_id), may_stop=may_stop)

    def _scan(self, text: str, *, may_stop: bool = True) -> str:
        shown, stop = self._scanner.push(text, may_stop=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, stop
            self.handle.abort(is_complete=True)
        return shown

    def _end(self, finished: Finished) -> str:
        if finished.reason is FinishReason.ERROR:
            status = 400 if finished.impossible else 500
            cause = hide_paths(finished.error or "no reason given")
            raise ApiError(status, f"The engine could not serve this request: {cause}")
        text = self._scan(self._stream.flush())
        if self.finish_reason is None:
            text += self._scanner.release()
            self.finish_reason = finished.reason.value
            if finished.stop_token_id in self._options.named_stop_tokens:
                self.stop_reason = finished.stop_token_id
        return text


class Generation:
    """All choices of one HTTP request, from submission to the last piece.

    Whoever makes one must call :meth:`close` in the end; it aborts what is not finished.

    Args:
        client: where the requests go.
        requests: one for each choice.
        texts: the model's.
        options: how tokens become text.
        observer: hears of every output and end.
        on_close: called once when all is over.
        timeout_s: the choices end with an error after this time; 0 for never.

    Attributes:
        choices: the answers under way.
        sent_until_s: on the event loop's clock, when a client must have read its answer; None for no limit.
    """

    def __init__(
        self,
        client: Engines,
        requests: Sequence[Request],
        texts: TextProcessor,
        options: TextOptions,
        observer: RequestObserver,
        timeout_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self._observer = observer
        self._on_close = on_close
        self._pieces: asyncio.Queue[OutputDelta | ApiError] = asyncio.Queue()
        self.choices = [
            ActiveChoice(index, handle, observer.watch(handle), texts, options)
            for index, handle in enumerate(map(client.submit, requests))
        ]
        self._tasks = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        loop = asyncio.get_running_loop()
        too_late = ApiError(504, f"The request did not finish within {timeout_s:g} s.")
        self._timer = loop.call_later(timeout_s, self.stop, too_late) if timeout_s > 0 else None
        self.sent_until_s = loop.time() + timeout_s + _READ_S if timeout_s > 0 else None
        self._end_reason = FinishReason.ABORT
        self._closed = False

    async def pieces(self) -> AsyncIterator[OutputDelta]:
        """Yield pieces of all choices as they come, until every choice has finished.

        Raises:
            ApiError: 500 a choice failed, 503 the engine is gone, 504 it took too long.
        """
        unfinished = len(self.choices)
        while unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            unfinished -= piece.finish_reason is not None
            yield piece

    def close(self) -> None:
        """Abort what is unfinished; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.handle.abort()
                choice.watch.finished(choice.completion_tokens, self._end_reason.value)
        self._on_close()

    def stop(self, error: ApiError) -> None:
        """Let the reader see ``error`` next, which ends the request: it failed, nobody hung up."""
        self._end_reason = FinishReason.ERROR
        self._pieces.put_nowait(error)

    async def _pump(self, choice: ActiveChoice) -> None:
        """Carry one choice's outputs over; a failure becomes the last thing that the reader sees."""
        try:
            async for output in choice.handle:
                piece = choice.take(output)
                choice.watch.output(len(piece.tokens), piece.text)
                self._pieces.put_nowait(piece)
                if piece.finish_reason is not None:
                    choice.watch.finished(choice.completion_tokens, piece.finish_reason)
                    return
            raise EngineError("the engine stopped answering")
        except ApiError as error:
            self._fail(choice, error)
        except EngineError as error:
            self._fail(choice, engine_unavailable(error))
        except Exception as error:
            log.error("a choice failed", engine_request=choice.handle.request.request_id, exc_info=error)
            self._fail(choice, unexpected_failure())

    def _fail(self, choice: ActiveChoice, error: ApiError) -> None:
        self._end_reason = FinishReason.ERROR  # of the other choices: nobody hung up
        choice.finish_reason = FinishReason.ERROR.value
        choice.handle.abort()  # the engine may still compute it, if the failure was here
        choice.watch.finished(choice.completion_tokens, FinishReason.ERROR.value)
        self._pieces.put_nowait(error)
