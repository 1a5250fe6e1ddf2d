"""Makes the engine's requests of a checked body: one for each prompt and choice."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.grammar_process import GrammarChecked, GrammarSpec, Thoughts
from lorikeet.chat.protocol import GenerationBody
from lorikeet.chat.sampling import (
    check_prompt,
    check_some_token,
    logit_bias_pairs,
    of_prompt,
    params_for_choice,
    sampling_params,
)
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Pooling, PromptEmbeds, Request, Slo
from lorikeet.http.tenancy import RateReport
from lorikeet.serving.generation import TextOptions
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.tenants.keys import Access


class Sender(NamedTuple):
    """The origin of a request.

    Attributes:
        request_id: the client's ``X-Request-Id``, or a generated one.
        tenant: the tenant that the request counts for; empty if it is not known.
        is_batch: whether it is a line of a batch: no client waits for it.
        access: the rights of its key.
        report: gets the rest of its limits.
        is_admin: whether it has an admin key, which shows requests of all tenants.
    """

    request_id: str
    tenant: str
    is_batch: bool
    access: Access
    report: RateReport
    is_admin: bool = False

    def may_see(self, tenant: str) -> bool:
        """Return whether requests of a tenant are shown to it."""
        return self.is_admin or tenant == self.tenant


@dataclass(frozen=True)
class GenerationSpec:
    """The part of a request in which the routes differ.

    Attributes:
        chat: settings of the model.
        prompts: number of prompts.
        encode: returns their token ids.
        prompt_param: field that holds them, for errors.
        default_max_tokens: limit on an answer if the body sets none, as far as the context has space; None for all of
            that space.
        logprobs: alternatives to report with each token; -1 for all, None for no log probabilities.
        prompt_logprobs: the same for the prompt.
        arrival_s: monotonic time at which the body had been received; None for now.
        kept_tokens: special tokens that stay in the text of an answer.
        grammar: the grammar that the answers follow; None for none.
        embeds: embeddings of each prompt, whose tokens then mean nothing; empty if the prompts are tokens.
        thoughts: returns the thoughts that may come before such an answer to a prompt.
        pooling: how a vector of each prompt is made; None for answers.
    """

    chat: ChatSettings
    prompts: int
    encode: Callable[[], Awaitable[list[list[int]]]]
    prompt_param: str
    default_max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    arrival_s: float | None = None
    kept_tokens: frozenset[int] = frozenset()
    grammar: GrammarSpec | None = None
    embeds: Sequence[PromptEmbeds] = ()
    thoughts: Callable[[list[int]], Thoughts | None] = lambda prompt: None
    pooling: Pooling | None = None


@dataclass(frozen=True)
class SharedFields:
    """Fields that all requests of a body have in common.

    Attributes:
        sender: the origin of the body.
        target: the model.
        choices: sequences for each prompt.
        arrival_s: monotonic time of arrival.
        cache_salt: see :func:`cache_salt`.
        slo: targets; None for none.
        grammar: the grammar that the answers follow; None for none.
        background: whether requests in the foreground go first.
    """

    sender: Sender
    target: ResolvedModel
    choices: int
    arrival_s: float
    cache_salt: str
    slo: Slo | None
    grammar: GrammarChecked | None
    background: bool


def engine_requests(
    body: GenerationBody,
    spec: GenerationSpec,
    prompts: Sequence[list[int]],
    predicted: Sequence[int | None],
    shared: SharedFields,
) -> list[Request]:
    """Return the requests of a body, the choices of the first prompt first.

    Args:
        body: types and ranges of its fields are already checked.
        spec: the fields in which the routes differ.
        prompts: token ids.
        predicted: predicted tokens of the answer to each prompt; None without a prediction.
        shared: fields of all requests.

    Raises:
        ApiError: 400, a prompt or a sampling field is not valid.
    """
    requests: list[Request] = []
    limits = spec.chat.limits
    sender = shared.sender
    task = shared.target.chat.task
    priority = sender.access.priority(body.priority or 0)
    weight = sender.access.weight
    logit_bias = logit_bias_pairs(body, limits.vocabulary, len(prompts) * shared.choices)
    bad_words = spec.chat.text_processor.bad_words(body.bad_words) if body.bad_words else ()
    for at, (token_ids, tokens) in enumerate(zip(prompts, predicted, strict=True)):
        embeds = spec.embeds[at] if spec.embeds else None
        start: int | None = 0
        if task.invocation_token_ids:
            start = task.start(token_ids) if embeds is None else None
        with of_prompt(f"{spec.prompt_param}.{at}" if len(prompts) > 1 else ""):
            check_prompt(token_ids, limits, spec.prompt_param)
        params = sampling_params(
            body,
            limits,
            prompt_tokens=len(token_ids),
            default_max_tokens=spec.default_max_tokens,
            logprobs=spec.logprobs,
            logit_bias=logit_bias,
            grammar="" if shared.grammar is None else shared.grammar.grammar,
            prompt_logprobs=spec.prompt_logprobs,
            bad_words=bad_words,
        )
        if spec.grammar is None or shared.grammar is None:
            check_some_token(params, limits.vocabulary)
        else:
            check_some_token(params, limits.vocabulary, shared.grammar.first, spec.grammar.param)
        for choice in range(shared.choices):
            requests.append(
                Request(
                    # The client's id may be in use, so a suffix makes it unique.
                    request_id=RequestId(f"{sender.request_id}-{secrets.token_hex(4)}-{len(requests)}"),
                    prompt_token_ids=token_ids,
                    sampling=params_for_choice(params, choice),
                    arrival_s=shared.arrival_s,
                    adapter=None if start is None else shared.target.adapter,
                    adapter_start=start or 0,
                    priority=priority,
                    tenant=sender.tenant,
                    tenant_weight=weight,
                    cache_salt=shared.cache_salt if embeds is None else f"{shared.cache_salt}\0{_digest(embeds)}",
                    slo=shared.slo,
                    predicted_tokens=None if tokens is None else min(tokens, params.max_tokens),
                    background=shared.background,
                    prompt_embeds=embeds,
                    pooling=spec.pooling,
                )
            )
    return requests


def cache_salt(body: GenerationBody, sender: Sender, epoch: str, *, is_shared: bool) -> str:
    """Return a text that separates a request's KV from the KV of requests with another text.

    Args:
        body: has the client's own salt.
        sender: its tenant, or the group of its key.
        epoch: changes when the prefix cache is reset; empty before that.
        is_shared: whether tenants reuse each other's KV.
    """
    key = sender.access.key
    # No tenant's name begins with a control character.
    owner = f"\1{key.settings.cache_group}" if key is not None and key.settings.cache_group else sender.tenant
    tenant = "" if is_shared else owner
    salt = body.cache_salt or ""
    plain = f"{tenant}\0{salt}" if tenant or salt else ""
    return f"{epoch}\0{plain}" if epoch else plain


def text_options(body: GenerationBody, spec: GenerationSpec) -> TextOptions:
    """Return how the tokens of an answer become text."""
    named = frozenset(body.stop_token_ids or ())
    return TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        named_stop_tokens=named if body.ignore_eos else named - set(spec.chat.limits.eos_token_ids),
        kept_tokens=spec.kept_tokens,
        is_empty=body.most_tokens[0] == 0,
    )


def _digest(embeds: PromptEmbeds) -> str:
    """Return a text that differs for different embeddings."""
    return hashlib.sha256(embeds.dtype.encode() + embeds.data).hexdigest()
