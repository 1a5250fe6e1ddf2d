"""A request as plain data: sampling parameters, latency limits, and the tokens so far.

There is no separate export format. A request that is preempted, migrated or resumed after its engine died is the same
value with ``output_token_ids`` filled. Penalty counts and the step of every sequence follow from the token ids. Text,
stop strings and the number of tokens sent belong to the client's stream in the API process.
"""

from enum import StrEnum

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.images import PromptImage

_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


class SloError(ValueError):
    """Raised when an SLO cannot be parsed. The message quotes the wrong part."""


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Latency limits of a request, in seconds; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def parse_slo(text: str) -> Slo:
    """Parse limits in seconds such as ``ttft=0.5,tpot=0.1,e2e=10``.

    Each part is optional.

    Raises:
        SloError: a name is unknown, or a value is not a number of at least 0.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limit_s = limits[_NAMES[name.strip()]] = float(value)
        except (KeyError, ValueError):
            limit_s = -1.0
        if not limit_s >= 0:
            raise SloError(f"{part!r} is not a limit; write for example ttft=0.5,tpot=0.1,e2e=10 (seconds)")
    return Slo(**limits)


def format_slo(slo: Slo) -> str:
    """Return limits in the format of :func:`parse_slo`; empty for no limits."""
    limits = {name: getattr(slo, field) for name, field in _NAMES.items()}
    return ",".join(f"{name}={limit_s:g}" for name, limit_s in limits.items() if limit_s is not None)


class SamplingParams(msgspec.Struct, frozen=True):
    """The sampling parameters of a request.

    Attributes:
        max_tokens: maximum number of tokens to generate, at least 1.
        seed: seed that, with the position, determines the sampling noise on any engine.
        min_tokens: number of tokens to generate before a stop token may be chosen.
        temperature: divisor of the logits. At or near 0 the most likely token is chosen.
        top_p: probability mass of the smallest set of most likely tokens to choose from.
        top_k: number of most likely tokens to choose from; 0 for all.
        min_p: minimum probability of a token, as a share of the most likely token's.
        presence_penalty: number subtracted from the logit of every token generated before.
        frequency_penalty: number subtracted from a token's logit once for each earlier occurrence among the generated
            tokens.
        repetition_penalty: divisor of positive (factor of negative) logits of tokens in prompt or output.
        logit_bias: (token id, addend) pairs.
        stop_token_ids: tokens that end the request (end of text included unless ignored).
        logprobs: number of alternatives to report with each token's log probability; None for no logprobs.
        logprob_token_ids: tokens to report as alternatives; empty for the most likely ones.
        prompt_logprobs: number of alternatives to report for the tokens of the prompt, from the second on; None for
            none.
        processed_logprobs: whether log probabilities are those of the distribution that was sampled from, after bias,
            penalties, forbidden tokens, temperature and filters. Those of a prompt have only the temperature. Otherwise
            they are the model's.
        allowed_token_ids: the only tokens that may be chosen; empty for all.
        bad_words: token sequences that may not occur in the output.
        grammar: grammar of the answer in llguidance's notation (see ``chat.structured_output``); empty for none.
    """

    max_tokens: int
    seed: int = 0
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""


class PromptEmbeds(msgspec.Struct, frozen=True):
    """Embeddings that replace the tokens of a prompt.

    Attributes:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        data: the numbers, ``[tokens, hidden]``, little-endian.
    """

    dtype: str
    data: bytes


class PoolingKind(StrEnum):
    """The way to make one vector from the hidden states of a prompt. Names are those of sentence-transformers."""

    LAST = "lasttoken"
    """The vector of the last token."""
    MEAN = "mean"
    """The mean over all tokens."""
    WEIGHTED_MEAN = "weightedmean"
    """The mean weighted by position: 1 for the first token, 2 for the second, and so on."""


class Pooling(msgspec.Struct, frozen=True):
    """Options of a request for one vector instead of tokens.

    Such a request only prefills, and samples no tokens.

    Attributes:
        kind: how to make one vector from the hidden states.
        scores: whether to apply the adapter's score head to the vector. The result then has one logit for each label,
            otherwise the size of the model's hidden states.
    """

    kind: PoolingKind = PoolingKind.LAST
    scores: bool = False

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the pooling needs the hidden states of all tokens, so that cached KV cannot be reused."""
        return self.kind is not PoolingKind.LAST


class Request(msgspec.Struct, frozen=True):
    """One sequence to continue.

    Attributes:
        request_id: id that is unique while the request lives.
        prompt_token_ids: tokens of the prompt, at least one.
        sampling: the sampling parameters.
        arrival_s: monotonic time at which the server accepted the request. It stays the same when the request moves.
        adapter: the request's adapter version; None for the base model.
        priority: priority for policies that use it; lower runs earlier.
        tenant: the request's owner, for policies that share between tenants; empty if not given.
        tenant_weight: weight of the owner's share.
        slo: latency limits; None for none.
        predicted_tokens: predicted length of the answer in tokens; None without a prediction.
        attempt: number of times that the request was sent to an engine before. The sender counts it.
        exports: number of times that an engine exported the request, by preemption or migration.
        output_token_ids: tokens generated so far.
        cache_salt: salt of the KV cache. Requests reuse only KV with the same salt; empty is the common salt.
        background: whether the request runs only when no other request waits, regardless of the policy.
        prompt_embeds: embeddings of all tokens of the prompt, whose ids then mean nothing. ``cache_salt`` distinguishes
            the KV of different embeddings.
        pooling: options of a request for one vector; None for a request for tokens.
        adapter_start: position of the first token on which the adapter acts (aLoRA). The KV before it is the base
            model's.
        session: name of a conversation or trajectory whose requests go to the same replica; empty for none.
        images: the prompt's images, by ascending ``offset``. Their ranges do not overlap.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    adapter: AdapterRef | None = None
    priority: int = 0
    tenant: str = ""
    slo: Slo | None = None
    predicted_tokens: int | None = None
    attempt: int = 0
    exports: int = 0
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    cache_salt: str = ""
    background: bool = False
    prompt_embeds: PromptEmbeds | None = None
    pooling: Pooling | None = None
    adapter_start: int = 0
    tenant_weight: float = 1.0
    session: str = ""
    images: tuple[PromptImage, ...] = ()

    @property
    def digest(self) -> AdapterDigest | None:
        """Digest of the request's adapter version; None for the base model."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def kv_salt(self) -> str:
        """Salt of the request's KV.

        A request that needs the outputs of all prompt tokens finds no KV of others.

        If these outputs are pooled, the request does not find its own KV after a preemption either, since the pooled
        sum is lost.
        """
        if self.pools_all_tokens:
            return f"{self.cache_salt}\0{self.request_id}\0{self.attempt}.{self.exports}"
        return self.cache_salt if self.sampling.prompt_logprobs is None else f"{self.cache_salt}\0{self.request_id}"

    @property
    def pools_all_tokens(self) -> bool:
        """Whether the hidden states of all the request's tokens are pooled."""
        return self.pooling is not None and self.pooling.needs_all_tokens

    @property
    def is_resumed(self) -> bool:
        """Whether an engine has run the request before."""
        return self.attempt > 0 or self.exports > 0

    @property
    def expected_tokens(self) -> int:
        """Length of the answer in tokens that policies assume: the prediction, else ``max_tokens``.

        The prediction is not limited to ``max_tokens`` here, since the predictor for clients already does so. In a
        workload with fixed answer lengths, ``max_tokens`` is the true length, and a limit would correct predictions
        that are wrong on purpose.
        """
        return self.sampling.max_tokens if self.predicted_tokens is None else max(1, self.predicted_tokens)
