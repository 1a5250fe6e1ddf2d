"""Holds the parts of a running server, and admits requests.

``Service.start`` tokenizes the prompts, checks the body, refuses the request if its SLO cannot be met, and submits it.
"""

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.task import AdapterTask
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.choice_prompt import CHOOSING_BODIES, choice_prompt
from lorikeet.chat.grammar_process import GrammarChecked
from lorikeet.chat.image_parts import image_files
from lorikeet.chat.prompt_process import BodyNeeds, BodyRead, WhichModel
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    ChatMessage,
    ChatOptions,
    CompletionRequest,
    GenerationBody,
    TokenizeRequest,
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
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.provenance import DIGEST_HEADER, Provenance
from lorikeet.core.request import Request, Slo
from lorikeet.http.admission import AdmissionGate, Ticket
from lorikeet.http.body_gate import BodyGate
from lorikeet.http.connections import ConnectionStats
from lorikeet.http.errors import ApiError, bad_request, engine_unavailable
from lorikeet.http.logs import log
from lorikeet.http.sessions import Sessions
from lorikeet.http.tenancy import RateReport, admit
from lorikeet.observe.length_prediction import AnswerLengthPredictor
from lorikeet.observe.observer import RequestObserver
from lorikeet.observe.shedding import TtftForecast
from lorikeet.observe.slo_targets import SloTargets
from lorikeet.observe.stats_stream import StatsStreams
from lorikeet.serving.adapter_changes import AdapterChanges
from lorikeet.serving.batches.batches import Batches
from lorikeet.serving.generation import Generation
from lorikeet.serving.images import PromptImages
from lorikeet.serving.large_bodies import PreparedBody, PromptProcesses, unpacked
from lorikeet.serving.leases import Lease
from lorikeet.serving.model_resolver import ModelResolver
from lorikeet.serving.requests import (
    GenerationSpec,
    Prompt,
    Sender,
    SharedFields,
    cache_salt,
    engine_requests,
    text_options,
)
from lorikeet.serving.served_models import ResolvedModel, ServedModels
from lorikeet.serving.stored_responses import StoredResponses
from lorikeet.tenants.keys import OPERATOR, ApiKey
from lorikeet.tenants.ledger import Grant
from lorikeet.tenants.tenants import Tenants

_WARM_TIMEOUT_S = 2.0
"""Most seconds to wait for gauges that show a warmed adapter."""
_WARM_POLL_S = 0.02


@dataclass
class Service:
    """Holds the parts of a running server, which all routes share."""

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
    images: PromptImages
    grammars: GrammarChecks
    observer: RequestObserver
    responses: StoredResponses
    base_task: AdapterTask = field(default_factory=AdapterTask)
    """Settings for making vectors with the base model."""
    tenants: Tenants | None = None
    sends_names: bool = False
    """Whether engines get the names of adapters, for events of KV."""
    """Keys of the registry's database; None without tenants."""
    ranks: int = 1
    """Number of tensor-parallel ranks of a replica."""
    connections: ConnectionStats = field(default_factory=ConnectionStats)
    used_adapters: dict[AdapterDigest, AdapterRef] = field(default_factory=dict)
    """Versions that requests have used. Metrics name removed versions by them."""
    copies: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests to shadows, whose answers are dropped."""
    generations: set[Generation] = field(default_factory=set)
    """Running requests."""
    sessions: Sessions = field(default_factory=Sessions)
    """Sessions of SageMaker's clients."""
    cache_epoch: str = ""
    """Text that changes with each reset of the prefix cache, so that later requests do not find earlier KV."""
    adapter_changes: AdapterChanges = field(default_factory=AdapterChanges)
    resolver: ModelResolver = field(init=False)
    """Finds the models of requests. It loads adapters through the service, so it is set after the service is built."""
    batches: Batches = field(init=False)
    """Files and batches, whose requests call the service's routes. Set after the service is built."""
    stats_streams: StatsStreams = field(init=False)
    shares_prefixes: bool = field(init=False)
    """Whether tenants reuse each other's KV: by the settings, or if the server has no keys."""

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

    @property
    def engine_status(self) -> str:
        """``ready``, ``asleep`` or ``engine down``."""
        if self.client.alive:
            return "ready"
        return "asleep" if self.client.is_asleep else "engine down"

    async def warm(self, model: str | None, sender: Sender) -> None:
        """Load an adapter onto the device of a replica by a request of one token. Routing chooses the replica.

        Returns when the gauges of that replica show the adapter, or after two seconds.

        Raises:
            ApiError: the model does not exist, or the engine cannot serve it.
        """

        async def encode() -> list[Prompt]:
            return [Prompt([0])]

        target, lease = await self.resolver.lease(model, access=sender.access)
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
        """Return whether the latest gauges show an adapter on a device; True without gauges."""
        stats = [view.stats for view in self.client.views.values() if view.stats is not None]
        wanted = None if target.adapter is None or not stats else target.adapter.digest
        return wanted is None or any(wanted in each.resident_adapters for each in stats)

    async def resolve(self, body: Body, sender: Sender, *, generates: bool = True) -> ResolvedModel:
        """Return the model that a body names for its sender; see :meth:`ModelResolver.resolve`."""
        return await self.resolver.resolve(
            getattr(body, "model", None),
            getattr(body, "lora_path", None),
            access=sender.access,
            generates=generates,
            key=sender.split_key(getattr(body, "user", None)),
            prompt=self._prompt_of(body),
        )

    async def lease(self, body: GenerationBody, sender: Sender) -> tuple[ResolvedModel, Lease]:
        """Return the model that a body names, and a lease of its version; see :meth:`ModelResolver.lease`."""
        return await self.resolver.lease(
            body.model,
            body.lora_path,
            access=sender.access,
            key=sender.split_key(body.user),
            prompt=self._prompt_of(body),
        )

    def _prompt_of(self, body: Body) -> Callable[[], str] | None:
        """Return a function for the text by which the model ``auto`` is chosen; None for a body without a prompt."""
        return partial(choice_prompt, body, self.text_processor) if isinstance(body, CHOOSING_BODIES) else None

    async def encode_chat(
        self, body: ChatCompletionRequest, chat: ChatSettings, prepared: PreparedBody | None
    ) -> list[Prompt]:
        """Return a conversation as the only prompt. See :meth:`encode_messages` for errors.

        Args:
            body: the conversation.
            chat: its model's settings.
            prepared: the prompt, if another process has read it.
        """
        if prepared:
            (token_ids,) = prepared.prompts
            prompt = Prompt(token_ids, prepared.images)
        else:
            limits = chat.limits if body.truncate_prompt_tokens is None else None
            prompt = await self.encode_messages(ChatCompletionRequest, body, body.messages, chat, limits)
        kept = prompt.token_ids if prepared and not prompt.images else truncated(prompt.token_ids, body, chat.limits)
        if prompt.images and len(kept) < len(prompt.token_ids):
            raise bad_request("A prompt with images cannot be truncated.", "truncate_prompt_tokens")
        return [Prompt(kept, prompt.images)]

    async def encode_messages(
        self,
        kind: type[ChatCompletionRequest | TokenizeRequest],
        body: ChatOptions,
        messages: Sequence[ChatMessage],
        chat: ChatSettings,
        limits: ModelLimits | None = None,
    ) -> Prompt:
        """Return a conversation as a prompt. Another process renders an adapter's own template, and decodes images.

        Args:
            kind: the kind of the body.
            body: the body.
            messages: its messages.
            chat: its model's settings.
            limits: the model's limits; None accepts any length.

        Raises:
            ApiError: see ``TextProcessor.encode_chat``; or an image cannot be used.
        """
        texts = chat.text_processor
        if chat.own is not None:
            read = await self.read_in_process(kind, body, chat.own)
            if read.images:
                return await self.images.encode(texts, read.text, read.images)
            if read.prompts:
                return Prompt(unpacked(read)[0])
            return Prompt(msgspec.json.decode(read.answer)["tokens"])
        style = chat.style(body)
        images = () if style.image_tokens is None else image_files(messages)
        if images:
            return await self.images.encode(texts, await texts.render_chat(messages, style), images, limits)
        return Prompt(await texts.encode_chat(messages, style, limits=limits))

    async def read_in_process(self, kind: type[Body], body: Body, own: AdapterChat) -> BodyRead:
        """Read, in another process, a body for an adapter that has its own chat template or tokens."""

        async def resolve(which: WhichModel) -> BodyNeeds:
            return BodyNeeds(own)

        content = body.model_dump_json(exclude_unset=True).encode()
        return await self.prompt_processes.read(kind, content, resolve, is_large=False)

    async def start(
        self, body: GenerationBody, target: ResolvedModel, lease: Lease, spec: GenerationSpec, sender: Sender
    ) -> Generation:
        """Accept a request and submit its sequences, ``n`` for each prompt, to the engine.

        Args:
            body: the body, whose fields have valid types and ranges.
            target: the model.
            lease: the lease of the model's version. The end of the generation closes it; after an error, the caller
                must.
            spec: the fields in which the routes differ.
            sender: the origin of the request.

        Raises:
            ApiError: the request cannot be accepted, or its prompt or sampling parameters are not valid.
        """
        choices = body.choices_per_prompt
        sequences = spec.prompts * choices
        structlog.contextvars.bind_contextvars(model=target.name, sequences=sequences)
        background = sender.is_batch or body.service_tier == "flex"
        slo: Slo | None = None
        # SLO targets apply only to requests that generate tokens.
        if self.targets.exist and not background and spec.pooling is None:
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
            token_ids = [prompt.token_ids for prompt in prompts]
            grammar: GrammarChecked | None = None
            if spec.grammar is not None:
                thoughts = spec.thoughts(token_ids[0])
                least = body.min_tokens or 0
                answer = msgspec.structs.replace(spec.grammar, thoughts=thoughts, least_tokens=least)
                try:
                    grammar = await self.grammars.check(answer, sequences)
                except ApiError:
                    await self.grammars.check_each(spec.function_grammars())
                    raise
            predicted: list[int | None] = [None] * len(prompts)
            if spec.pooling is None:
                predicted = await self.lengths.predict(
                    token_ids, None if target.adapter is None else target.adapter.name
                )
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
            self._prove(requests, target, body.expect_digest, sender)
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
                base_digest=self.models.base_digest,
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
        if target.split:
            self._copy_to_shadows(body, target, spec, prompts, sender)
        if target.chosen:
            self.observer.metrics.count_auto(target.name)
            for choice in generation.choices:
                choice.handle.timings.chosen = target.chosen
        return generation

    def _copy_to_shadows(
        self,
        body: GenerationBody,
        target: ResolvedModel,
        spec: GenerationSpec,
        prompts: list[Prompt],
        sender: Sender,
    ) -> None:
        """Count a request of a split, and send copies of it to the shadows of the split in the background."""
        count = self.observer.metrics.count_split
        count(target.split, target.name, "served")
        split = self.resolver.splits.get(target.split)
        for shadow in () if split is None else split.copied_to(target.split, sender.request_id):
            count(target.split, shadow, "shadow")
            task = asyncio.create_task(self._answer_copy(body, shadow, spec, prompts, sender))
            self.copies.add(task)
            task.add_done_callback(self.copies.discard)

    async def _answer_copy(
        self, body: GenerationBody, shadow: str, spec: GenerationSpec, prompts: list[Prompt], sender: Sender
    ) -> None:
        """Answer a copy of a request under another adapter, and drop the answer. Its figures count."""

        async def encode() -> list[Prompt]:
            return prompts

        copy = Sender(f"{sender.request_id}-shadow", "", True, OPERATOR, RateReport())
        body = body.model_copy(update={"expect_digest": None, "service_tier": "flex"})
        try:
            target, lease = await self.resolver.lease(shadow, access=OPERATOR)
            with lease:
                chat = await self.chats.settings_of(target.chat)
                spec = dataclasses.replace(spec, chat=chat, encode=encode, arrival_s=None)
                generation = await self.start(body, target, lease, spec, copy)
            try:
                async for _ in generation.deltas():
                    pass
            finally:
                generation.close()
        except ApiError as error:
            log.warning("a copy of a request was not answered", adapter=shadow, error=error.message)

    def _prove(self, requests: Sequence[Request], target: ResolvedModel, expected: str | None, sender: Sender) -> None:
        """Report the weights that will make the answers, and check that they are the expected ones.

        Raises:
            ApiError: 409, they are others; the message has both digests.
        """
        made_by = dict.fromkeys(Provenance(self.models.base_digest, request.digest or "") for request in requests)
        if (headers := sender.answer_headers) is not None:
            before = filter(None, headers.get(DIGEST_HEADER, "").split(", "))
            headers[DIGEST_HEADER] = ", ".join(dict.fromkeys([*before, *(each.digests for each in made_by)]))
        if expected is None:
            return
        for each in made_by:
            if not each.matches(expected):
                has = f"has the digest {each.adapter}" if each.adapter else "is answered by the base alone"
                raise ApiError(
                    409,
                    f"expect_digest is {expected}, but `{target.name}` {has}; the base's digest is {each.base}.",
                    param="expect_digest",
                    headers={"x-should-retry": "false"},
                )

    def gate_of(self, *, is_batch: bool) -> AdmissionGate:
        """Return the gate for a request. Lines of batches have their own gate, so that other requests keep theirs."""
        return self.batch_gate if is_batch else self.gate

    def adapters_by_digest(self, digests: Set[AdapterDigest]) -> dict[AdapterDigest, list[AdapterRef]]:
        """Return versions by digest with all their names; a version whose names were removed has its last name."""
        used = {digest: [self.used_adapters[digest]] for digest in digests & self.used_adapters.keys()}
        named: dict[AdapterDigest, list[AdapterRef]] = {}
        for record in self.catalog.list():
            if record.digest in digests:
                named.setdefault(record.digest, []).append(record.ref)
        return used | named

    def names_of(self, digest: AdapterDigest) -> list[str]:
        """Return the names of an adapter version; see :meth:`adapters_by_digest`."""
        return [adapter.name for adapter in self.adapters_by_digest({digest}).get(digest, ())]

    def stop_all(self) -> None:
        """End all running requests with an error for their clients."""
        for generation in self.generations:
            generation.stop(ApiError(503, "The server was stopped before the request had finished."))

    async def _admit(self, tenants: Tenants, key: ApiKey, requests: list[Request], sender: Sender) -> Grant | None:
        """Count a tenant's request against its limits. See ``tenancy.admit`` for errors."""
        try:
            tokens = sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
            return await admit(tenants.ledger, key, len(requests), tokens, sender.report, is_batch=sender.is_batch)
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

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Exclude the present KV from reuse by later requests. Its blocks are evicted when memory is needed.

        Args:
            recompute: whether requests in flight compute their KV again, from the tokens that they have.
        """
        self.cache_epoch = secrets.token_hex(8)  # The epoch is random, so that a client's salt cannot equal it.
        self.send_names()
        if recompute:
            self.client.recompute(self.cache_epoch)

    def send_names(self) -> None:
        """Send the engines all names and the epoch of salts, if they report events of KV."""
        if self.sends_names:
            names = {record.name: record.digest for record in self.catalog.list()}
            self.client.name_adapters(names, self.cache_epoch)

    def _shed(self, requests: list[Request], forecast: TtftForecast) -> None:
        """Refuse a request whose first token is predicted to miss its target, so that it does not delay other requests.

        Raises:
            ApiError: 429, with the predicted time until the queue is short enough.
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
