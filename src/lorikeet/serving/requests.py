"""Makes the engine's requests from a checked body: one for each prompt and choice."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
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
from lorikeet.core.images import PromptImage
from lorikeet.core.request import Pooling, PromptEmbeds, Request, Slo
from lorikeet.http.tenancy import RateReport
from lorikeet.serving.generation import TextOptions
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.tenants.keys import Access


class Sender(NamedTuple):
    """The origin of a request.

    Attributes:
        request_id: the client's ``X-Request-Id``, or a generated one.
        tenant: the tenant that the request counts for; empty if unknown.
        is_batch: whether the request is a line of a batch, for which no client waits.
        access: the rights of the sender's key.
        report: receives the remaining limits of the sender's key.
        is_admin: whether the sender has an admin key, which shows requests of all tenants.
        answer_headers: receives headers of the answer; None where no header is sent.
        session: name of a conversation whose requests go to the same replica; empty for none.
    """

    request_id: str
    tenant: str
    is_batch: bool
    access: Access
    report: RateReport
    is_admin: bool = False
    answer_headers: MutableMapping[str, str] | None = None
    session: str = ""

    def split_key(self, user: str | None) -> str:
        """Return what chooses the version of a split: the user, else the session, else this request alone."""
        return user or self.session or self.request_id

    def may_see(self, tenant: str) -> bool:
        """Return whether the sender may see the requests of a tenant."""
        return self.is_admin or tenant == self.tenant


class Prompt(NamedTuple):
    """One prompt in the engine's form.

    Attributes:
        token_ids: its tokens.
        images: its images, in order.
    """

    token_ids: list[int]
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class GenerationSpec:
    """The fields of a request in which the routes differ.

    Attributes:
        chat: chat settings of the model.
        prompts: number of prompts.
        encode: returns the prompts.
        prompt_param: name of the prompts' field, for errors.
        default_max_tokens: limit on an answer's tokens if the body sets no limit; None for all remaining context.
        logprobs: alternatives to report with each token; -1 for all, None for no log probabilities.
        prompt_logprobs: the same for the prompt.
        arrival_s: monotonic time at which the body was complete; None for now.
        kept_tokens: special tokens that are never left out of an answer's text.
        grammar: the grammar that the answers follow; None without a grammar.
        function_grammars: returns the grammar of each function alone, to name the one with an error.
        embeds: embeddings of each prompt, which replace the prompt's tokens; empty if the prompts are tokens.
        thoughts: returns the form of the thoughts that may precede such an answer to a prompt.
        pooling: settings for making a vector of each prompt; None for answers in text.
    """

    chat: ChatSettings
    prompts: int
    encode: Callable[[], Awaitable[list[Prompt]]]
    prompt_param: str
    default_max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    arrival_s: float | None = None
    kept_tokens: frozenset[int] = frozenset()
    grammar: GrammarSpec | None = None
    function_grammars: Callable[[], Iterable[GrammarSpec]] = tuple
    embeds: Sequence[PromptEmbeds] = ()
    thoughts: Callable[[list[int]], Thoughts | None] = lambda prompt: None
    pooling: Pooling | None = None


@dataclass(frozen=True)
class SharedFields:
    """Fields that all requests of a body share.

    Attributes:
        sender: the origin of the body.
        target: the model.
        choices: number of sequences for each prompt.
        arrival_s: monotonic time at which the body was complete.
        cache_salt: see :func:`cache_salt`.
        slo: the targets; None without targets.
        grammar: the grammar that the answers follow; None without a grammar.
        background: whether requests in the foreground are scheduled first.
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
    prompts: Sequence[Prompt],
    predicted: Sequence[int | None],
    shared: SharedFields,
) -> list[Request]:
    """Return the engine's requests for a body, ordered by prompt and then by choice.

    Args:
        body: the body, whose fields have valid types and ranges.
        spec: the fields in which the routes differ.
        prompts: the prompts.
        predicted: predicted number of output tokens for each prompt; None without a prediction.
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
    for at, ((token_ids, images), tokens) in enumerate(zip(prompts, predicted, strict=True)):
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
                    # Another request may have the same client id, so a suffix makes it unique.
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
                    session=sender.session,
                    images=images,
                )
            )
    return requests


def cache_salt(body: GenerationBody, sender: Sender, epoch: str, *, is_shared: bool) -> str:
    """Return the salt of a request: only requests with the same salt share KV.

    Args:
        body: the body, with the client's own salt.
        sender: the request's sender, with the tenant or the key's group.
        epoch: text that changes with each reset of the prefix cache; empty before the first reset.
        is_shared: whether tenants may reuse each other's KV.
    """
    key = sender.access.key
    # Names of tenants cannot begin with a control character, so salts of groups and tenants differ.
    owner = f"\1{key.settings.cache_group}" if key is not None and key.settings.cache_group else sender.tenant
    tenant = "" if is_shared else owner
    salt = body.cache_salt or ""
    plain = f"{tenant}\0{salt}" if tenant or salt else ""
    return f"{epoch}\0{plain}" if epoch else plain


def text_options(body: GenerationBody, spec: GenerationSpec) -> TextOptions:
    """Return the options for turning the tokens of an answer into text."""
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
