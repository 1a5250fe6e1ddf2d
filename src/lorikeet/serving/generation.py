"""Runs one HTTP request: submits its sequences to the engine and turns the tokens into text."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from lorikeet.chat.text_processor import StopScanner, TextProcessor
from lorikeet.client.client import Engines, RequestHandle, RequestOutput
from lorikeet.client.supervisor import EngineError
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.plan import Token
from lorikeet.core.provenance import Provenance
from lorikeet.core.request import Request
from lorikeet.http.errors import ApiError, engine_unavailable, hide_paths, unexpected_failure
from lorikeet.http.logs import log
from lorikeet.observe.observer import RequestObserver, RequestWatch

_READ_S = 10.0
"""Seconds after the time-out in which a client may read its answer. Then the request is closed."""


@dataclass(frozen=True)
class TextOptions:
    """Options for turning tokens into text.

    Attributes:
        stops: stop strings.
        include_stop: whether the stop string or stop token stays in the text.
        skip_special_tokens: whether special tokens, such as end of text, are left out.
        named_stop_tokens: stop tokens that the request names, as opposed to the model's own.
        is_empty: whether all generated tokens are left out of the answer.
        kept_tokens: special tokens that ``skip_special_tokens`` does not leave out.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    named_stop_tokens: frozenset[int] = frozenset()
    is_empty: bool = False
    kept_tokens: frozenset[int] = frozenset()


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """The part of one choice that one output of the engine added.

    Attributes:
        index: the choice's index.
        text: new text; empty while characters or stop strings are incomplete.
        tokens: new tokens.
        finish_reason: ``stop``, ``length`` or ``abort`` in the last delta, else None.
        stop_reason: the stop string or the named stop token that ended the choice.
        completion_tokens: number of tokens generated so far.
    """

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    completion_tokens: int


class ActiveChoice:
    """One running choice: the engine's handle, the weights that make it, and its text so far."""

    def __init__(
        self,
        index: int,
        handle: RequestHandle,
        watch: RequestWatch,
        text_processor: TextProcessor,
        options: TextOptions,
        base_digest: str,
    ) -> None:
        self.index = index
        self.provenance = Provenance(base_digest, handle.request.digest or "")
        self.handle = handle
        self.watch = watch
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._options = options
        self._sampling = handle.request.sampling
        self._stop_tokens = frozenset(self._sampling.stop_token_ids)
        prompt = handle.request.prompt_token_ids
        self._stream = text_processor.stream(
            prompt, skip_special_tokens=options.skip_special_tokens, kept=options.kept_tokens
        )
        self._scanner = StopScanner(options.stops, include=options.include_stop) if options.stops else None
        hides = options.skip_special_tokens and self._scanner is not None
        found = text_processor.special_tokens_in(options.stops) if hides else {}
        self._in_stops = {token_id: text for token_id, text in found.items() if token_id not in options.kept_tokens}
        """Special tokens that are not shown, and are parts of stop strings."""

    def add_output(self, output: RequestOutput) -> OutputDelta:
        """Turn one output of the engine into a delta. A stop string ends the choice and aborts the request.

        Raises:
            ApiError: the engine reports that the request failed.
        """
        if self._options.is_empty:
            output = output._replace(tokens=())
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
        hidden = self._in_stops.get(token_id)
        if hidden is not None:
            return self._scan(hidden, may_stop=may_stop, is_hidden=True)
        return self._scan(self._stream.push(token_id), may_stop=may_stop)

    def _scan(self, text: str, *, may_stop: bool = True, is_hidden: bool = False) -> str:
        if self._scanner is None:
            return text
        shown, stop = self._scanner.push(text, may_stop=may_stop, is_hidden=is_hidden)
        if stop is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = stop
            self.handle.abort(is_complete=True)
        return shown

    def _end(self, finished: Finished) -> str:
        if finished.reason is FinishReason.ERROR:
            status = 400 if finished.impossible else 500
            cause = hide_paths(finished.error or "no reason given")
            # A retry would fail, too: after the loss of an engine, requests continue without an error.
            never = {"x-should-retry": "false"}
            raise ApiError(status, f"The engine could not serve this request: {cause}", headers=never)
        text = self._scan(self._stream.flush())
        if self.finish_reason is None:
            text += "" if self._scanner is None else self._scanner.release()
            self.finish_reason = finished.reason.value
            if self._options.is_empty and finished.reason is FinishReason.STOP:
                self.finish_reason = FinishReason.LENGTH.value
            elif finished.stop_token_id in self._options.named_stop_tokens:
                self.stop_reason = finished.stop_token_id
        return text


class Generation:
    """Runs all choices of one HTTP request, from submission to the last delta.

    The caller must call :meth:`close`, which aborts unfinished choices.

    Args:
        client: the engines' client, which runs the requests.
        requests: one request for each choice.
        text_processor: the model's text processor.
        options: options for turning tokens into text.
        observer: records the outputs and the end of each choice.
        on_close: function that is called once, when the generation is closed.
        timeout_s: seconds after which the choices end with an error; 0 for no limit.
        base_digest: hex SHA-256 of the base.

    Attributes:
        choices: the request's choices, running or finished.
        closed: event that is set when the generation is closed.
        read_until_s: time on the event loop's clock by which the client must have read the answer; None for no limit.
    """

    def __init__(
        self,
        client: Engines,
        requests: Sequence[Request],
        text_processor: TextProcessor,
        options: TextOptions,
        observer: RequestObserver,
        timeout_s: float,
        on_close: Callable[[], None],
        base_digest: str,
    ) -> None:
        self._observer = observer
        self._on_close = on_close
        self._deltas: asyncio.Queue[OutputDelta | ApiError] = asyncio.Queue()
        self._write: Callable[[OutputDelta], bool] | None = None
        self._has_caught_up = False
        """Whether the reader of :meth:`deltas` has handled every delta that it took."""
        self.choices = [
            ActiveChoice(index, handle, observer.watch(handle), text_processor, options, base_digest)
            for index, handle in enumerate(map(client.submit, requests))
        ]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._time_out, timeout_s) if timeout_s > 0 else None
        self.read_until_s = loop.time() + timeout_s + _READ_S if timeout_s > 0 else None
        self._end_reason = FinishReason.ABORT
        self._end_error = ""
        self.closed = asyncio.Event()
        for choice in self.choices:
            choice.handle.listen(partial(self._receive, choice))

    def provenance(self, index: int = 0) -> Provenance:
        """Return the weights that generate a choice. A request keeps its adapter version until its end."""
        return self.choices[index].provenance

    def weight_versions(self, index: int, tokens: int) -> list[dict[str, Any]]:
        """Return the weights of the first ``tokens`` tokens of a choice, as vLLM's spans of token positions."""
        version = self.provenance(index).fingerprint
        return [{"version": version, "start": 0, "end": tokens}] if tokens else []

    async def deltas(self) -> AsyncIterator[OutputDelta]:
        """Yield the deltas of all choices as they arrive, until every choice has finished.

        Raises:
            ApiError: 500 if a choice failed, 503 if the engine is gone, 504 after the time-out.
        """
        unfinished = len(self.choices)
        while unfinished:
            self._has_caught_up = True
            delta = await self._deltas.get()
            self._has_caught_up = False
            if isinstance(delta, ApiError):
                raise delta
            unfinished -= delta.finish_reason is not None
            yield delta

    def pass_on(self, write: Callable[[OutputDelta], bool]) -> None:
        """Pass deltas to a function as they arrive, which costs much less than reading them from :meth:`deltas`.

        The reader of :meth:`deltas` still gets the last delta of each choice, deltas for which ``write`` returns False,
        and deltas that arrive before the reader has handled all earlier ones. Function and reader together get every
        delta once, in order.
        """
        self._write = write

    def close(self) -> None:
        """Abort unfinished choices; a second call does nothing."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.handle.abort()
                choice.watch.finished(choice.completion_tokens, self._end_reason.value, self._end_error)
        self._on_close()

    def abort(self) -> None:
        """End unfinished choices with their present tokens and the finish reason ``abort``."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.handle.abort()

    def stop(self, error: ApiError) -> None:
        """End the request with ``error``, which the reader gets next. The request counts as failed, not as aborted."""
        self._end_reason = FinishReason.ERROR
        self._end_error = error.message
        self._deltas.put_nowait(error)

    def _time_out(self, timeout_s: float) -> None:
        self.stop(ApiError(504, f"The request did not finish within {timeout_s:g} s."))

    def _receive(self, choice: ActiveChoice, output: RequestOutput | EngineError) -> None:
        """Queue the delta of an engine's output for the reader. Outputs after a choice's end are ignored."""
        if choice.finish_reason is not None or self.closed.is_set():
            return
        try:
            if isinstance(output, EngineError):
                raise output
            delta = choice.add_output(output)
            choice.watch.output(len(delta.tokens), delta.text)
            if delta.finish_reason is not None:
                self._deltas.put_nowait(delta)
                choice.watch.finished(choice.completion_tokens, delta.finish_reason)
            elif not (self._write and self._has_caught_up and self._deltas.empty() and self._write(delta)):
                self._deltas.put_nowait(delta)
        except ApiError as error:
            self._fail(choice, error)
        except EngineError as error:
            self._fail(choice, engine_unavailable(error))
        except Exception as error:
            log.error("a choice failed", engine_request=choice.handle.request.request_id, exc_info=error)
            self._fail(choice, unexpected_failure())

    def _fail(self, choice: ActiveChoice, error: ApiError) -> None:
        # The other choices end with this reason, too: no client has aborted them.
        self._end_reason = FinishReason.ERROR
        self._end_error = error.message
        choice.finish_reason = FinishReason.ERROR.value
        choice.handle.abort()  # After a failure in this process, the engine may still run the request.
        choice.watch.finished(choice.completion_tokens, FinishReason.ERROR.value, error.message)
        self._deltas.put_nowait(error)
