"""Runs one request on an engine in this process, for ``lorikeet generate`` and ``adapters inspect --check``."""

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from lorikeet.adapters.checkpoint import AdapterChecks
from lorikeet.adapters.description import INDEX_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import AdapterStore, adapted, reference
from lorikeet.chat.protocol import ChatMessage
from lorikeet.chat.text_processor import IncrementalDetokenizer, PromptStyle, TextProcessor
from lorikeet.config import AdapterSettings, ConfigError, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.driver import wait_for_work
from lorikeet.engine.loop import Engine
from lorikeet.http.errors import ApiError
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.model_folder import prepare_model
from lorikeet.terminal import ProgressDisplay


class GenerationError(RuntimeError):
    """The request failed; the message has the reason."""


def stream_answer(
    settings: Settings, prompt: str, adapter: Path | None, sampling: SamplingParams, *, raw: bool
) -> Iterator[str]:
    """Yield the text of one answer as it is computed. The progress of loading is shown on stderr.

    Args:
        settings: settings of the model and the engine.
        prompt: text to answer.
        adapter: folder of a PEFT adapter; None for the base model.
        sampling: sampling parameters, to which the model's stop tokens are added.
        raw: whether to continue ``prompt`` without the chat template.

    Raises:
        GenerationError: model, adapter or prompt cannot be used.
    """
    with TemporaryDirectory(prefix="lorikeet-") as scratch:
        engine, request, text = _prepare(settings, prompt, adapter, sampling, Path(scratch), raw=raw)
        try:
            yield from _decode(engine, request, text)
        finally:
            engine.close()


def _prepare(
    settings: Settings, prompt: str, adapter: Path | None, sampling: SamplingParams, scratch: Path, *, raw: bool
) -> tuple[Engine, Request, IncrementalDetokenizer]:
    """Return a new engine, the request and its detokenizer. See :func:`stream_answer` for errors."""
    with ProgressDisplay() as display:
        try:
            folder = prepare_model(settings.model, display.stage).path
            config = read_model_config(folder)
            text_processor = TextProcessor.read(folder)
            token_ids = _token_ids(text_processor, prompt, raw=raw)
            sampling = _within(config, len(token_ids), sampling)
            # The context is no longer than needed, since many machines lack memory for the model's whole context.
            longest_tokens = len(token_ids) + sampling.max_tokens
            model = msgspec.structs.replace(settings.model, model=str(folder), max_model_len=longest_tokens)
            engine, sizes, *_ = build_replica(msgspec.structs.replace(settings, model=model), display.show)
            dtype = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
            ref = None
            start = 0
            if adapter is not None:
                ref = _adapter(adapter, sizes.geometry, dtype, scratch)
                ref, start = adapted(ref, sizes.geometry, token_ids)
        except ApiError as error:
            raise GenerationError(error.message) from error
        except (AdapterError, ConfigError, OSError, ValueError) as error:
            raise GenerationError(str(error)) from error
    request = Request(RequestId("generate"), token_ids, sampling, MonotonicClock().now(), ref, adapter_start=start)
    return engine, request, text_processor.stream(token_ids)


def _adapter(folder: Path, geometry: ModelGeometry, dtype: str, scratch: Path) -> AdapterRef:
    """Return a reference to an adapter. The files of a sharded adapter are merged in ``scratch``.

    Raises:
        AdapterError: the adapter is not valid, or does not fit model or dtype.
    """
    if not (folder / WEIGHTS_FILE).is_file() and (folder / INDEX_FILE).is_file():
        store = AdapterStore(scratch, AdapterSettings(), geometry, AdapterChecks(dtype))
        try:
            _, merged = store.add(str(folder), trusted=True)
        finally:
            store.close()
        return reference(folder.name, merged, geometry, dtype)
    return reference(folder.name, folder, geometry, dtype)


def _token_ids(text_processor: TextProcessor, prompt: str, *, raw: bool) -> list[int]:
    if raw or text_processor.template is None:
        return text_processor.token_ids(prompt, add_special_tokens=True)
    text = text_processor.chat_prompt([ChatMessage(role="user", content=prompt)], PromptStyle())
    return text_processor.token_ids(text, add_special_tokens=False)


def _within(config: ModelConfig, prompt_tokens: int, sampling: SamplingParams) -> SamplingParams:
    """Return ``sampling`` with the model's stop tokens, limited to the remaining context after the prompt.

    Raises:
        GenerationError: the prompt is empty, or fills the context.
    """
    room_tokens = config.context_tokens - prompt_tokens
    if not prompt_tokens or room_tokens < 1:
        raise GenerationError(
            f"the prompt has {prompt_tokens} tokens; the model takes 1 to {config.context_tokens - 1}"
        )
    most_tokens = min(sampling.max_tokens, room_tokens)
    return msgspec.structs.replace(sampling, stop_token_ids=config.eos_token_ids, max_tokens=most_tokens)


def _decode(engine: Engine, request: Request, text: IncrementalDetokenizer) -> Iterator[str]:
    for token in run_alone(engine, request):
        yield text.push(token.token_id)
    yield text.flush()


def run_alone(engine: Engine, request: Request) -> Iterator[Token]:
    """Run a request on an engine without other requests, and yield its tokens as they are sampled.

    Raises:
        GenerationError: the request failed.
    """
    engine.submit(request)
    while engine.has_requests:
        outputs = engine.step()
        for output in outputs.tokens:
            yield from output.tokens
        for event in outputs.events:
            if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                raise GenerationError(event.error or "the request failed")
        if not engine.is_busy and engine.has_requests:
            wait_for_work(engine, MonotonicClock(), math.inf)
