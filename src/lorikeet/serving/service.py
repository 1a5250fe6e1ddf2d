"""The parts of a running server, the admission of a request, and how routes get at both.

``Service.start`` admits a request: it tokenizes the prompts, checks the body, sheds if it must, and submits.
"""

import asyncio
import math
import re
import secrets
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import structlog
from anyio import CapacityLimiter
from fastapi import Depends
from fastapi import Request as HttpRequest

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.mixture import Part
from lorikeet.adapters.task import AdapterTask
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.grammar_process import GrammarChecked
from lorikeet.chat.mixtures import PREFIX, Mixtures, name_of, spelling
from lorikeet.chat.prompt_process import BodyNeeds, BodyRead, WhichModel
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
)
from lorikeet.chat.sampling import (
    ModelLimits,
    truncated,
)
from lorikeet.chat.structured_output import GrammarChecks
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.client.client import Engines
from lorikeet.client.supervisor import EngineError
from lorikeet.config import AdapterSettings, ServerSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.request import Request, Slo
from lorikeet.http.admission import AdmissionGate, Ticket
from lorikeet.http.body_gate import BodyGate
from lorikeet.http.connections import ConnectionStats
from lorikeet.http.errors import ApiError, bad_request, engine_unavailable
from lorikeet.http.sessions import Sessions
from lorikeet.http.tenancy import RateReport, admit
from lorikeet.http.threads import in_daemon_thread
from lorikeet.observe.length_prediction import AnswerLengthPredictor
from lorikeet.observe.observer import RequestObserver
from lorikeet.observe.shedding import TtftForecast
from lorikeet.observe.slo_targets import SloTargets
from lorikeet.observe.stats_stream import StatsStreams
from lorikeet.serving.adapter_loader import AdapterLoader
from lorikeet.serving.batches.batches import Batches
from lorikeet.serving.generation import Generation
from lorikeet.serving.large_bodies import PreparedBody, PromptProcesses, unpacked
from lorikeet.serving.leases import AdapterLeases, Lease, VersionChanged
from lorikeet.serving.load_places import LoadPlaces
from lorikeet.serving.requests import (
    GenerationSpec,
    Sender,
    SharedFields,
    cache_salt,
    engine_requests,
    text_options,
)
from lorikeet.serving.served_models import ResolvedModel, ServedModels, check_use
from lorikeet.serving.stored_responses import StoredResponses
from lorikeet.tenants.keys import Access, ApiKey
from lorikeet.tenants.ledger import Grant
from lorikeet.tenants.tenants import Tenants

_INDEX = re.compile("[0-9]{1,10}")
_SHOWN_CHARS = 200
_ATTEMPTS = 3
"""Tries to make a mixture before another request's takes its place."""

_WARM_TIMEOUT_S = 2.0
"""Most seconds to wait for gauges that show a warmed adapter."""
_WARM_POLL_S = 0.02


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class Service:
    """The parts of a running server, shared by all routes."""

    settings: ServerSettings
    adapter_settings: AdapterSettings
    client: Engines
    catalog: AdapterCatalog
    chats: AdapterChats
    models: ServedModels
    targets: SloTargets
    gate: AdmissionGate
    batch_gate: AdmissionGate
    lengths: AnswerLengthPredictor
    body_gate: BodyGate
    prompt_processes: PromptProcesses
    grammars: GrammarChecks
    observer: RequestObserver
    leases: AdapterLeases
    loader: AdapterLoader
    mixtures: Mixtures
    responses: StoredResponses
    batches: Batches
    base_task: AdapterTask = field(default_factory=AdapterTask)
    """How the base model makes vectors."""
    tenants: Tenants | None = None
    """Keys of the registry's database; None without one."""
    ranks: int = 1
    """Tensor-parallel ranks of a replica."""
    unpaused: asyncio.Event = field(default_factory=_set_event)
    """Cleared while generation is paused."""
    connections: ConnectionStats = field(default_factory=ConnectionStats)
    used_adapters: dict[AdapterDigest, AdapterRef] = field(default_factory=dict)
    """Versions that requests used, so that metrics can name those whose name was removed."""
    generations: set[Generation] = field(default_factory=set)
    """Running requests."""
    sessions: Sessions = field(default_factory=Sessions)
    """Of SageMaker's clients."""
    cache_epoch: str = ""
    """Changes when the prefix cache is reset, so that no later request finds KV from before."""
    background: set[asyncio.Task[int]] = field(default_factory=set)
    """Tasks that drop adapters; kept here so that they are not garbage-collected."""
    loads: LoadPlaces = field(default_factory=LoadPlaces)
    """Limits adapter loads by host. Apart from the threads that tokenize, so that slow downloads delay no request."""
    removals: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    """Limits adapter removals to one at a time, as the catalog does. They never wait for a download."""
    stats_streams: StatsStreams = field(init=False)
    shares_prefixes: bool = field(init=False)
    """Whether tenants reuse each other's KV: if the settings say so, or if no keys keep tenants apart."""

    def __post_init__(self) -> None:
        has_keys = bool(self.settings.api_keys) or self.tenants is not None
        self.shares_prefixes = self.settings.shared_prefix_cache or not has_keys
        self.stats_streams = StatsStreams(lambda: self.gate.draining)

    @property
    def text_processor(self) -> TextProcessor:
        """Tokenizer and chat template of the base model."""
        return self.chats.base.text_processor

    @property
    def limits(self) -> ModelLimits:
        """Limits and defaults of the base model."""
        return self.chats.base.limits

    async def resolve(
        self, model: str | None, lora_path: str | None = None, *, access: Access, generates: bool = True
    ) -> ResolvedModel:
        """Return the model that a request names; an adapter that is not registered is loaded, if there is a source.

        Args:
            model, lora_path: the names.
            access: the sender's rights.
            generates: whether the request must wait while generation is paused. It then gets the version that its
                adapter has after that.

        Raises:
            ApiError: as ``ServedModels.resolve`` and ``AdapterLoader.load``.
        """
        if generates:
            await self.unpaused.wait()
        mixture = self.models.mixture(model)
        if mixture is not None:
            if lora_path:
                raise bad_request("model names a mixture, so lora_path cannot name an adapter.", "lora_path")
            prefix, parts = mixture
            named = [(await self._named(part, access), weight) for part, weight in parts]
            text = model or "" if named == parts else prefix + spelling(named)
            return await self._mixed(text, [part for part in named if part[1]], access)
        if self.loader.is_enabled:
            for name in self.models.missing(model, lora_path):
                if not access.may_use(name):  # it is not looked for
                    if name in await self.unloaded_names(access):
                        check_use(access, (name,), name)
                    break
                await self.loader.load(name)
        target = self.models.resolve(model, lora_path, access)
        if target.adapter is not None:
            self.loader.use(target.name)
        return target

    async def lease(
        self, model: str | None, lora_path: str | None = None, *, access: Access, generates: bool = True
    ) -> tuple[ResolvedModel, Lease]:
        """Resolve a model as :meth:`resolve`, and lease its version. The caller must close the lease.

        Raises:
            ApiError: as :meth:`resolve`.
        """
        while True:
            target = await self.resolve(model, lora_path, access=access, generates=generates)
            with suppress(VersionChanged):  # another thread has just replaced it
                return target, self.leases.take(target.adapter)

    async def unloaded_names(self, access: Access) -> list[str]:
        """Return the names that would be loaded from the folder that is served, and that may be seen."""
        if not self.loader.is_enabled:
            return []
        names = await in_daemon_thread(self.loader.names)
        return [name for name in names if access.may_see(name) and not self.models.is_base(name)]

    async def adapter_names(self, access: Access) -> list[str]:
        """Return the names of the adapters that a sender may see, in the order of ``GET /v1/adapters``."""
        names = {*filter(access.may_see, self.catalog.names()), *await self.unloaded_names(access)}
        return sorted(names)

    async def _named(self, part: str, access: Access) -> str:
        """Return the adapter's name for llama.cpp's index of one, and any other text as it is.

        Mixtures, which come and go, are not counted. An adapter whose name is a number goes first.

        Raises:
            ApiError: 404, there is no such index.
        """
        if not _INDEX.fullmatch(part):
            return part
        names = [name for name in await self.adapter_names(access) if not name.startswith(PREFIX)]
        if part in names:
            return part
        if int(part) >= len(names):
            raise ApiError(404, f"There is no adapter {part}: /v1/adapters lists {len(names)}, from 0.", param="lora")
        return names[int(part)]

    async def _mixed(self, text: str, mixture: Sequence[tuple[str, float]], access: Access) -> ResolvedModel:
        """Return a mixture, which is made if it is not there.

        Its conversations are those of its adapters if they are the same for all of them, else the base model's.
        """
        if not mixture:
            return self.models.resolve(self.models.base, None, access)
        targets = [await self.resolve(name, access=access, generates=False) for name, _ in mixture]
        parts = []
        for (name, weight), target in zip(mixture, targets, strict=True):
            is_mixture = target.name.startswith(PREFIX)
            if target.adapter is None or is_mixture or target.chat.task.invocation_token_ids:
                raise bad_request(f"{name!r} is no adapter that can be mixed.", "model")
            parts.append((target.adapter, weight))
        chat = targets[0].chat if all(target.chat == targets[0].chat for target in targets) else AdapterChat()
        for _ in range(_ATTEMPTS):
            with ExitStack() as leases:
                for adapter, _ in parts:
                    leases.enter_context(self.leases.take(adapter))
                name = await self._made(text, parts)
            record = self.models.record(name)
            if record is not None:
                named = msgspec.structs.replace(record.ref, name=AdapterName(text))
                return ResolvedModel(text, named, msgspec.structs.replace(chat, task=AdapterTask()))
            self.mixtures.lost(name)  # somebody has removed it
        raise ApiError(409, f"The mixture `{text}` has just changed; send the request again.")

    async def _made(self, text: str, parts: Sequence[Part]) -> str:
        """Return the name under which a mixture is registered. Errors call it as the client wrote it."""
        try:
            return await self.mixtures.get(parts)
        except ApiError as error:
            own = name_of(parts)
            shown = text[:_SHOWN_CHARS]
            said = error.message.replace(f"adapter {own!r}", f"mixture {shown!r}").replace(own, shown)
            raise ApiError(error.status, said, param="model", type=error.type) from error

    async def warm(self, model: str | None, sender: Sender) -> None:
        """Bring an adapter onto the device of the replica that the router chooses, by a request of one token.

        Returns when the gauges of that replica show the adapter, or after two seconds.

        Raises:
            ApiError: there is no such model, or the engine cannot serve it.
        """

        async def encode() -> list[list[int]]:
            return [[0]]

        target, lease = await self.lease(model, access=sender.access)
        with lease:
            body = CompletionRequest(model=target.name, prompt=[0], max_tokens=1)
            spec = GenerationSpec(await self.chats.settings_of(target.chat), 1, encode, "prompt", 1, None)
            generation = await self.start(body, target, lease, spec, sender)
        try:
            async for _ in generation.deltas():
                pass
        finally:
            generation.close()
        until_s = time.monotonic() + _WARM_TIMEOUT_S
        while not self._shows_warm(target) and time.monotonic() < until_s:
            await asyncio.sleep(_WARM_POLL_S)

    def _shows_warm(self, target: ResolvedModel) -> bool:
        """Whether the gauges, which come now and then, show an adapter on a device; True if there are none."""
        stats = [view.stats for view in self.client.views.values() if view.stats is not None]
        wanted = None if target.adapter is None or not stats else target.adapter.digest
        return wanted is None or any(wanted in each.resident_adapters for each in stats)

    async def encode_chat(
        self, body: ChatCompletionRequest, chat: ChatSettings, prepared: PreparedBody | None
    ) -> list[list[int]]:
        """Return the token ids of a conversation, its only prompt; raises as ``TextProcessor.encode_chat``.

        An adapter's own template is rendered in another process.
        """
        if prepared:
            return prepared.prompts
        if chat.own is not None:
            (prompt,) = unpacked(await self.read_in_process(ChatCompletionRequest, body, chat.own))
        else:
            limits = chat.limits if body.truncate_prompt_tokens is None else None
            prompt = await chat.text_processor.encode_chat(body.messages, chat.style(body), limits=limits)
        return [truncated(prompt, body, chat.limits)]

    async def read_in_process(self, kind: type[Body], body: Body, own: AdapterChat) -> BodyRead:
        """Read a body of an adapter that has a chat template or tokens of its own."""

        async def resolve(which: WhichModel) -> BodyNeeds:
            return BodyNeeds(own)

        content = body.model_dump_json(exclude_unset=True).encode()
        return await self.prompt_processes.read(kind, content, resolve, is_large=False)

    async def start(
        self, body: GenerationBody, target: ResolvedModel, lease: Lease, spec: GenerationSpec, sender: Sender
    ) -> Generation:
        """Accept a request and submit its sequences, ``n`` for each prompt, to the engine.

        Args:
            body: types and ranges of its fields are already checked.
            target: the model.
            lease: keeps its version; the end of the generation closes it. After an error the caller does.
            spec: the fields in which the routes differ.
            sender: the origin of the request.

        Raises:
            ApiError: it cannot be accepted, or its prompt or sampling parameters are not valid.
        """
        choices = body.choices_per_prompt
        sequences = spec.prompts * choices
        structlog.contextvars.bind_contextvars(model=target.name, sequences=sequences)
        background = sender.is_batch or body.service_tier == "flex"
        slo: Slo | None = None
        if self.targets.exist and not background and spec.pooling is None:  # targets are of tokens
            slo = self.targets.of(None if target.adapter is None else target.adapter.name)
        try:
            gate = self.batch_gate if sender.is_batch else self.gate
            ticket = gate.enter(sequences)
        except ApiError as error:
            if error.status == 429:
                self.observer.refused(target.adapter, slo, sender.tenant, sequences, shed=False)
            raise
        grant: Grant | None = None
        try:
            prompts = await spec.encode()
            grammar: GrammarChecked | None = None
            if spec.grammar is not None:
                answer = msgspec.structs.replace(spec.grammar, thoughts=spec.thoughts(prompts[0]))
                grammar = await self.grammars.check(answer, sequences)
            predicted: list[int | None] = [None] * len(prompts)
            if spec.pooling is None:
                predicted = await self.lengths.predict(prompts, None if target.adapter is None else target.adapter.name)
            shared = SharedFields(
                sender,
                target,
                choices,
                time.monotonic() if spec.arrival_s is None else spec.arrival_s,
                cache_salt(body, sender, self.cache_epoch, is_shared=self.shares_prefixes),
                slo,
                grammar,
                background,
            )
            requests = engine_requests(body, spec, prompts, predicted, shared)
            options = text_options(body, spec)
            if self.observer.forecast is not None:
                self._shed(requests, self.observer.forecast)
            if self.tenants is not None and sender.access.key is not None:
                grant = await self._admit(self.tenants, sender.access.key, requests, sender)
            if target.adapter is not None:
                self.used_adapters[target.adapter.digest] = target.adapter
            generation = Generation(
                self.client,
                requests,
                spec.chat.text_processor,
                options,
                self.observer,
                0.0 if sender.is_batch else self.settings.request_timeout_s,
                on_close=lambda: self._ended(generation, ticket, lease, grant),
            )
        except BaseException as error:
            ticket.release()
            if grant is not None and self.tenants is not None:
                self.tenants.ledger.release(grant, 0)
            if isinstance(error, EngineError):
                raise engine_unavailable(error) from error
            raise
        lease.submitted()
        self.observer.metrics.observe_params(body.n or 1, requests[0].sampling.max_tokens)
        self.generations.add(generation)
        return generation

    def gate_of(self, *, is_batch: bool) -> AdmissionGate:
        """Return the gate that a request enters; lines of batches take no place of others."""
        return self.batch_gate if is_batch else self.gate

    def adapters_by_digest(self, digests: Set[AdapterDigest]) -> dict[AdapterDigest, list[AdapterRef]]:
        """Return these versions under all their names; a version without a name under the last one it was used by."""
        used = {digest: [self.used_adapters[digest]] for digest in digests & self.used_adapters.keys()}
        named: dict[AdapterDigest, list[AdapterRef]] = {}
        for record in self.catalog.list():
            if record.digest in digests:
                named.setdefault(record.digest, []).append(record.ref)
        return used | named

    def stop_all(self) -> None:
        """End all running requests with an error that their clients see."""
        for generation in self.generations:
            generation.stop(ApiError(503, "The server was stopped before the request had finished."))

    async def _admit(self, tenants: Tenants, key: ApiKey, requests: list[Request], sender: Sender) -> Grant | None:
        """Take the places of a tenant's request; raises as ``tenancy.admit``."""
        try:
            return await admit(tenants.ledger, key, requests, sender.report, is_batch=sender.is_batch)
        except ApiError as error:
            if error.status == 429:
                first = requests[0]
                self.observer.refused(first.adapter, first.slo, sender.tenant, len(requests), shed=False)
            raise

    def _ended(self, generation: Generation, ticket: Ticket, lease: Lease, grant: Grant | None) -> None:
        self.generations.discard(generation)
        ticket.release()
        if grant is not None and self.tenants is not None:
            choices = generation.choices
            used = sum(len(each.handle.request.prompt_token_ids) + each.completion_tokens for each in choices)
            self.tenants.ledger.release(grant, used)
        lease.close()

    def reset_prefix_cache(self) -> None:
        """Stop later requests from reusing the present KV. Its blocks are evicted as room is needed."""
        self.cache_epoch = secrets.token_hex(8)  # random, so that no tenant or salt makes the same text

    def _shed(self, requests: list[Request], forecast: TtftForecast) -> None:
        """Refuse requests whose first token is predicted to miss its target, so that they do not delay others.

        Raises:
            ApiError: 429, with the time after which the queue may be short enough.
        """
        request = requests[0]
        if request.slo is None or request.slo.ttft_s is None:
            return
        target_s = request.slo.ttft_s
        predicted_s = forecast.ttft_s(request, len(requests) - 1)
        if predicted_s > target_s:
            self.observer.refused(request.adapter, request.slo, request.tenant, len(requests), shed=True)
            raise ApiError(
                429,
                f"Too many requests are waiting: the first token is predicted after {predicted_s:.3g} s, and the TTFT "
                f"target is {target_s:g} s; try again later.",
                headers={"Retry-After": str(math.ceil(predicted_s - target_s))},
            )


async def _service(request: HttpRequest) -> Service:
    # If it were not async, FastAPI would run it in a thread for every request.
    service: Service = request.app.state.service
    return service


def access_of(request: HttpRequest) -> Access:
    """Return what the sender of a request may do, as the middleware has found."""
    access: Access = request.scope["state"]["access"]
    return access


async def _sender(request: HttpRequest) -> Sender:
    state = request.scope["state"]
    return Sender(
        state["request_id"],
        state["tenant"],
        state.get("is_batch", False),
        access_of(request),
        state.get("rate_report", RateReport()),
        state.get("is_admin", False),
    )


ServiceDep = Annotated[Service, Depends(_service)]
SenderDep = Annotated[Sender, Depends(_sender)]
