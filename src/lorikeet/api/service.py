"""The parts of a running server, how a body becomes requests to the engine, and how routes get at both."""

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import structlog
from anyio import CapacityLimiter
from fastapi import Depends
from fastapi import Request as HttpRequest

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import UnknownAdapter
from lorikeet.api.connections import ConnectionStats
from lorikeet.api.errors import ApiError, engine_unavailable, model_not_found
from lorikeet.api.generation import Generation, TextOptions
from lorikeet.api.large_bodies import BodyGate, PromptProcesses, check_content_type
from lorikeet.api.length_prediction import AnswerLengthPredictor
from lorikeet.api.middleware import AdmissionGate, Ticket
from lorikeet.api.observer import RequestObserver
from lorikeet.api.protocol import GenerationBody, may_hold_surrogates, refuse_lone_surrogates
from lorikeet.api.sampling import ModelLimits, check_prompt, logit_bias_pairs, params_for_choice, sampling_params
from lorikeet.api.served_models import ResolvedModel, ServedModels
from lorikeet.api.slo_targets import SloTargets
from lorikeet.api.text_processor import TextProcessor
from lorikeet.client.client import Engines
from lorikeet.client.supervisor import EngineError
from lorikeet.config import AdapterSettings, ServerSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.request import Request, Slo

_LOADS_AT_ONCE = 4
"""Of adapters."""


@dataclass(frozen=True)
class GenerationSpec:
    """The part of a body in which the two completion routes differ.

    Attributes:
        prompts: how many prompts there are.
        encode: gives their token ids.
        prompt_param: field that holds them.
        default_max_tokens: of an answer if the body does not say, as far as the context leaves room; None for all of
            the room.
        logprobs: alternatives to report with each token; None for no log probabilities.
        arrival_s: monotonic time at which the body had been received; None for now.
    """

    prompts: int
    encode: Callable[[], Awaitable[list[list[int]]]]
    prompt_param: str
    default_max_tokens: int | None
    logprobs: int | None
    arrival_s: float | None = None


class Sender(NamedTuple):
    """Who sent a request.

    Attributes:
        request_id: the client's name for it, or one that was made.
        tenant: whom it counts for; empty if nobody said.
    """

    request_id: str
    tenant: str


@dataclass
class Service:
    """The parts of a running server. Owned by the application; routes read it."""

    settings: ServerSettings
    adapter_settings: AdapterSettings
    client: Engines
    catalog: AdapterCatalog
    texts: TextProcessor
    models: ServedModels
    limits: ModelLimits
    targets: SloTargets
    gate: AdmissionGate
    lengths: AnswerLengthPredictor
    body_gate: BodyGate
    prompt_processes: PromptProcesses
    observer: RequestObserver
    connections: ConnectionStats = field(default_factory=ConnectionStats)
    used_adapters: dict[AdapterDigest, AdapterRef] = field(default_factory=dict)
    """Versions that requests ran under, to name those in metrics that have no name any more."""
    generations: set[Generation] = field(default_factory=set)
    """Requests under way."""
    background: set[asyncio.Task[int]] = field(default_factory=set)
    """Adapters being dropped; kept here so that nobody collects the tasks."""
    loads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_LOADS_AT_ONCE))
    """Of adapters. Apart from the threads that tokenize: slow downloads delay no request."""
    removals: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    """Of adapters: one after the other, as the catalog does them, and none after a slow download."""

    async def start(
        self, body: GenerationBody, target: ResolvedModel, job: GenerationSpec, sender: Sender
    ) -> Generation:
        """Accept a request and hand its sequences, ``n`` for each prompt, to the engine.

        Raises:
            ApiError: it cannot be accepted, or its prompt or sampling is not valid.
        """
        arrival_s = time.monotonic() if job.arrival_s is None else job.arrival_s
        sequences = job.prompts * (body.n or 1)
        structlog.contextvars.bind_contextvars(model=target.name, sequences=sequences)
        slo = self.targets.of(None if target.adapter is None else target.adapter.name)
        try:
            ticket = self.gate.enter(sequences)
        except ApiError as error:
            if error.status == 429:
                self.observer.refused(target.adapter, slo, sequences, shed=False)
            raise
        held: AdapterRef | None = None
        try:
            prompts = await job.encode()
            predicted = await self.lengths.predict(prompts, None if target.adapter is None else target.adapter.name)
            held = self._hold(target)
            requests = self._requests(body, held, job, prompts, predicted, slo, sender, arrival_s)
            self._shed(requests)

            generation = Generation(
                self.client,
                requests,
                self.texts,
                self._text_options(body),
                self.observer,
                self.settings.request_timeout_s,
                on_close=lambda: self._ended(generation, ticket, held),
            )
        except BaseException as error:
            ticket.release()
            if held is not None:
                self.catalog.release(held.digest)
            if isinstance(error, EngineError):
                raise engine_unavailable(error) from error
            raise
        self.generations.add(generation)
        return generation

    def adapters_by_digest(self, digests: Set[AdapterDigest]) -> dict[AdapterDigest, list[AdapterRef]]:
        """Return these versions under all their names; one that lost them under the name it was last used by."""
        used = {digest: [self.used_adapters[digest]] for digest in digests & self.used_adapters.keys()}
        named: dict[AdapterDigest, list[AdapterRef]] = {}
        for record in self.catalog.list():
            if record.digest in digests:
                named.setdefault(record.digest, []).append(record.ref)
        return used | named

    def stop_all(self) -> None:
        """End all requests under way with an error that their clients see."""
        for generation in self.generations:
            generation.stop(ApiError(503, "The server was stopped before the request had finished."))

    def _ended(self, generation: Generation, ticket: Ticket, held: AdapterRef | None) -> None:
        self.generations.discard(generation)
        ticket.release()
        if held is not None:
            self.catalog.release(held.digest)

    def _requests(
        self,
        body: GenerationBody,
        adapter: AdapterRef | None,
        job: GenerationSpec,
        prompts: list[list[int]],
        predicted: list[int | None],
        slo: Slo | None,
        sender: Sender,
        arrival_s: float,
    ) -> list[Request]:
        requests: list[Request] = []
        cache_salt = self._cache_salt(body, sender)
        logit_bias = logit_bias_pairs(body, self.limits.vocabulary, len(prompts) * (body.n or 1))
        for token_ids, tokens in zip(prompts, predicted, strict=True):
            check_prompt(token_ids, self.limits, job.prompt_param)
            params = sampling_params(
                body,
                self.limits,
                prompt_tokens=len(token_ids),
                default_max_tokens=job.default_max_tokens,
                logprobs=job.logprobs,
                logit_bias=logit_bias,
            )
            for choice in range(body.n or 1):
                requests.append(
                    Request(
                        # The client's id may be in use; the suffix makes it unique, the start tells whose it is.
                        request_id=RequestId(f"{sender.request_id}-{secrets.token_hex(4)}-{len(requests)}"),
                        prompt_token_ids=token_ids,
                        sampling=params_for_choice(params, choice),
                        arrival_s=arrival_s,
                        adapter=adapter,
                        priority=body.priority or 0,
                        tenant=sender.tenant,
                        cache_salt=cache_salt,
                        slo=slo,
                        predicted_tokens=None if tokens is None else min(tokens, params.max_tokens),
                    )
                )
        return requests

    def _cache_salt(self, body: GenerationBody, sender: Sender) -> str:
        """Return what a request's KV is told apart by: its tenant, where keys keep tenants apart, and what it says."""
        is_shared = self.settings.shared_prefix_cache or not self.settings.api_keys
        tenant, salt = "" if is_shared else sender.tenant, body.cache_salt or ""
        return f"{tenant}\0{salt}" if tenant or salt else ""

    def _shed(self, requests: list[Request]) -> None:
        """Refuse requests that would get their first token too late, before they make others wait.

        Raises:
            ApiError: 429, with the time after which the queue may be short enough.
        """
        request, forecast = requests[0], self.observer.forecast
        if forecast is None or request.slo is None or request.slo.ttft_s is None:
            return
        target_s, predicted_s = request.slo.ttft_s, forecast.ttft_s(request, len(requests) - 1)
        if predicted_s > target_s:
            self.observer.refused(request.adapter, request.slo, len(requests), shed=True)
            raise ApiError(
                429,
                f"Too many requests are waiting: the first token is predicted after {predicted_s:.3g} s, and the TTFT "
                f"target is {target_s:g} s; try again later.",
                headers={"Retry-After": str(math.ceil(predicted_s - target_s))},
            )

    def _hold(self, target: ResolvedModel) -> AdapterRef | None:
        """Keep the adapter's files until the request has ended.

        Returns:
            The version: the newest one, if the name was given to another while the prompt was read.

        Raises:
            ApiError: 404, the name was removed meanwhile.
        """
        adapter = target.adapter
        if adapter is None:
            return None
        while True:
            try:
                self.catalog.acquire(adapter.digest)
            except UnknownAdapter:
                record = self.models.record(target.name)
                if record is None:
                    raise model_not_found(target.name) from None
                adapter = record.ref
            else:
                self.used_adapters[adapter.digest] = adapter
                return adapter

    def _text_options(self, body: GenerationBody) -> TextOptions:
        named = frozenset(body.stop_token_ids or ())
        return TextOptions(
            stops=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            named_stop_tokens=named if body.ignore_eos else named - set(self.limits.eos_token_ids),
        )


async def _service(request: HttpRequest) -> Service:
    # Not async, FastAPI would run it in a thread, for every request.
    service: Service = request.app.state.service
    return service


async def _is_json(request: HttpRequest) -> None:
    """Check the content type, and that all text can be written as UTF-8, which no lone surrogate can."""
    check_content_type(request)
    body = await request.body()
    if may_hold_surrogates(body):
        refuse_lone_surrogates(body, await request.json())


async def _sender(request: HttpRequest) -> Sender:
    return Sender(request.state.request_id, request.state.tenant)


ServiceDep = Annotated[Service, Depends(_service)]
SenderDep = Annotated[Sender, Depends(_sender)]
JsonBody = Depends(_is_json)
