"""Holds the state of the scheduler: limits, sequences, statistics, and estimated step times."""

import collections.abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorikeet.core.events import FinishReason, FirstToken, RequestEvent
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.image_keys import hashed_token_ids, image_key
from lorikeet.core.messages import TokenOutput
from lorikeet.core.plan import SequenceStart, SequenceStep, StateStep, Token
from lorikeet.core.request import Request
from lorikeet.memory.blocks import SequenceLease, WaitReason
from lorikeet.presets import ColdStart

FORGET = 0.998
"""Factor by which a sample's weight falls with each later sample. About the last 500 samples count."""
_PRIOR = 1e-3
_ROUNDS = 8
"""Number of reweighting rounds of a robust fit."""
_EXACT = 0.01
"""Residual, as a share of the median value, below which a sample counts as exactly on the line."""

Floats = NDArray[np.float64]


def faded(old: Any, new: Any, times: int = 1) -> Any:
    """Return a fading sum after adding ``new`` ``times`` times; see ``FORGET``."""
    if times == 1:  # as a rule
        return FORGET * old + new
    weight = FORGET**times
    return weight * old + new * ((1 - weight) / (1 - FORGET))


def _least_squares(squares: Floats, products: Floats) -> Floats:
    """Solve normal equations with non-negative coefficients.

    The most negative coefficient is dropped until none is negative.
    """
    parts: Floats = np.asarray(np.linalg.solve(squares, products), np.float64)
    if parts.min() >= 0:  # as a rule
        return parts
    used = list(range(len(products)))
    used.remove(int(parts.argmin()))
    while used:
        parts[:] = 0.0
        parts[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if parts.min() >= 0:
            break
        used.remove(int(parts.argmin()))
    return parts


class OnlineFit:
    """Fits least squares with non-negative coefficients, in which old samples fade.

    Args:
        features: number of features of a sample. The first feature is always 1.
    """

    def __init__(self, features: int) -> None:
        self._squares = _PRIOR * np.eye(features)
        self._products = np.zeros(features)
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: tuple[float, ...] | list[float], value: float) -> None:
        """Add a sample."""
        features = np.array(sample, np.float64)
        self._squares = faded(self._squares, features[:, None] * features)
        self._products = faded(self._products, features * value)
        self._parts = None

    @property
    def is_known(self) -> bool:
        """Whether there have been samples with values above 0."""
        return bool(self._products[0])

    def parts(self) -> Floats:
        """Return the coefficient of each feature; all are 0 before the first sample."""
        if self._parts is None:
            self._parts = _least_squares(self._squares, self._products)
        return self._parts


class RobustFit:
    """Fits least absolute deviations with non-negative coefficients, over the last samples of each kind.

    An outlier has no more influence than a sample on the fitted line, so a delayed step hardly matters. The method is
    iteratively reweighted least squares: I. Daubechies et al., "Iteratively reweighted least squares minimization for
    sparse recovery", CPAM 2010.

    Args:
        features: number of features of a sample. The first feature is always 1.
        kinds: number of kinds of samples. New samples replace only old samples of their kind, so rare kinds are kept.
        window: number of samples that are kept for each kind.
        ridge: ridge penalty, as a share of the sum of each feature's squares. Features that always occurred together
            then share their effect.
    """

    def __init__(self, features: int, kinds: int, window: int, ridge: float) -> None:
        self._window = window
        self._ridge = ridge
        self._samples = np.zeros((kinds, window, features))
        self._values = np.zeros((kinds, window))
        self._times = np.zeros((kinds, window))
        self._noted = [0] * kinds
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: Floats, value: float, times: int, kind: int) -> None:
        """Add a sample that occurred ``times`` times."""
        place = self._noted[kind] % self._window
        self._noted[kind] += 1
        self._samples[kind, place] = sample
        self._values[kind, place] = value
        self._times[kind, place] = times
        self._parts = None

    def parts(self) -> Floats:
        """Return the coefficient of each feature; all are 0 before the first sample."""
        if self._parts is None:
            used = self._times > 0
            samples = self._samples[used]
            values = self._values[used]
            times = self._times[used]
            near = _EXACT * float(np.median(values)) + 1e-12
            weights = times
            diagonal = np.diag_indices(samples.shape[1])
            for _ in range(_ROUNDS):
                weighted = samples.T * weights
                squares = weighted @ samples
                squares[diagonal] += self._ridge * squares[diagonal] + _PRIOR
                self._parts = _least_squares(squares, weighted @ values)
                weights = times * near / np.maximum(np.abs(samples @ self._parts - values), near)
        assert self._parts is not None
        return self._parts


class StepTimeEstimator:
    """Fits recent step times linearly: a cost per step, per prefill token, and per decode.

    Estimates are 0 before the first step.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(features=3)
        self._costs_s: tuple[float, float, float] | None = None

    def note(self, prefill_tokens: int, decodes: int, duration_s: float) -> None:
        """Add the duration of a step."""
        self._fit.note((1.0, prefill_tokens, decodes), duration_s)
        self._costs_s = None

    @property
    def is_known(self) -> bool:
        """Whether a step has been recorded."""
        return self._fit.is_known

    def step_s(self, prefill_tokens: float, decodes: float) -> float:
        """Return the expected seconds of a step."""
        base_s, prefill_s, decode_s = self._fitted()
        return float(base_s + prefill_s * prefill_tokens + decode_s * decodes)

    def row_cost(self, rows: int) -> float:
        """Return the time that a further decoded row adds to a step, as a share of the step's time per row."""
        base_s, _, decode_s = self._fitted()
        of_row_s = base_s / max(1, rows) + decode_s
        return decode_s / of_row_s if of_row_s else 0.0

    def prefill_s(self, tokens: float) -> float:
        """Return the expected seconds by which this many prompt tokens lengthen a step."""
        _, prefill_s, _ = self._fitted()
        return float(prefill_s * tokens)

    def alone_s(self, input_tokens: float, output_tokens: float) -> float:
        """Return the expected seconds of a request that runs alone."""
        return self.step_s(input_tokens, 0) + (output_tokens - 1) * self.step_s(0, 1)

    def _fitted(self) -> tuple[float, float, float]:
        """Return the seconds of a step, of a prompt token and of a decode.

        The values are cached, because they are read often.
        """
        if self._costs_s is None:
            base_s, prefill_s, decode_s = self._fit.parts().tolist()
            self._costs_s = base_s, prefill_s, decode_s
        return self._costs_s


class SchedulerLimits(msgspec.Struct, frozen=True):
    """Holds the limits of a plan.

    Attributes:
        max_num_seqs: largest number of sequences in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        max_model_len: largest number of tokens in a sequence.
        num_scheduler_steps: largest number of identical decode steps in one plan.
        multi_step_limit_s: seconds after which a plan of several steps ends.
        max_draft_tokens: largest number of drafted tokens of a sequence in a step; 0 for no drafts.
        async_scheduling: whether the executor returns each step of such a plan while the next one is running. If so,
            ``num_scheduler_steps`` and ``multi_step_limit_s`` apply only while requests wait. Otherwise plans are
            longer, unless ``num_scheduler_steps`` is 1.
        whole_images: whether a step computes all tokens of an image, or none, because they see each other.
        whole_prompts: the same of all tokens of a prompt with an image.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_scheduler_steps: int = 1
    multi_step_limit_s: float = 0.05
    async_scheduling: bool = False
    max_draft_tokens: int = 0
    whole_images: bool = False
    whole_prompts: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """Tracks a waiting or running request in the scheduler.

    A sequence has no explicit phase. Prefill, chunked prefill, decode and recompute all follow from ``computed_tokens``
    and ``len(token_ids)``.

    Attributes:
        request: the request as submitted or resumed.
        queued_s: time at which it was queued.
        max_total_tokens: largest number of tokens of prompt and output together.
        digest: digest of the request's adapter; None for the base model.
        token_ids: tokens of the prompt and of the output so far.
        prompt_tokens: number of tokens of the prompt.
        image_keys: keys of the embeddings of its images.
        computed_tokens: number of tokens whose KV is in the sequence's blocks.
        lease: lease of the sequence's blocks; None while it waits.
        sent_blocks: number of blocks of the lease that were sent to the executor.
        started: whether the sequence was sent to the executor.
        keys: keys of the whole blocks that the sequence had when it was queued.
        restarts: whether the sequence runs again from its prompt. Tokens that were sent before are not sent again.
        refused: reason why the last admission failed; None if it was not refused.
        admitted_s: time of the admission.
        cold_start: the way in which the sequence waits for its adapter, until its first token; None if the adapter was
            on the device.
        cold_tokens: number of tokens of the prefill that waits for the adapter.
        merge_saved_s: seconds that merged steps have saved the sequence so far.
    """

    request: Request
    queued_s: float
    max_total_tokens: int
    digest: AdapterDigest | None = field(init=False)
    token_ids: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    image_keys: tuple[bytes, ...] = field(init=False)
    computed_tokens: int = 0
    lease: SequenceLease | None = None
    sent_blocks: int = 0
    started: bool = False
    keys: list[bytes] = field(default_factory=list)
    restarts: bool = False
    refused: WaitReason | None = None
    admitted_s: float = 0.0
    cold_start: ColdStart | None = None
    cold_tokens: int = 0
    merge_saved_s: float = 0.0

    def __post_init__(self) -> None:
        """Set the token lists from the request, with the output of earlier attempts unless the sequence restarts."""
        self.digest = self.request.digest
        known = [] if self.restarts else self.request.output_token_ids
        self.token_ids = self.request.prompt_token_ids + known
        self.prompt_tokens = len(self.request.prompt_token_ids)
        request = self.request
        self.image_keys = tuple(image_key(request, image) for image in request.images)

    @property
    def request_id(self) -> RequestId:
        """Id of the sequence's request."""
        return self.request.request_id

    @property
    def hashed_token_ids(self) -> list[int]:
        """Tokens for the keys of KV, see ``core.image_keys``."""
        return hashed_token_ids(self.token_ids, self.request.images)

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far, by this or another engine."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens to compute until the next token can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the sequence may still generate."""
        return self.max_total_tokens - len(self.token_ids)

    @property
    def is_ready(self) -> bool:
        """Whether the sequence has its blocks, and all transfers that it waited for have ended."""
        return self.lease is not None and self.lease.is_ready

    @property
    def can_run(self) -> bool:
        """Whether the sequence may be part of a step."""
        return self.lease is not None and (self.lease.is_ready or self.is_cold)

    @property
    def is_cold(self) -> bool:
        """Whether the sequence can prefill with the assistance of host cores while its adapter is in flight."""
        return self.lease is not None and self.lease.is_cold and not self.is_decoding

    @property
    def waits_to_decode(self) -> bool:
        """Whether the assisted prefill is done and the adapter is still in flight, so that decoding must wait."""
        return self.lease is not None and self.lease.is_cold and self.is_decoding

    @property
    def is_decoding(self) -> bool:
        """Whether the sequence decodes: one token remains to compute, after the first output token."""
        known = len(self.token_ids)  # this property is read several times a step for every sequence
        return known - self.computed_tokens == 1 and known > self.prompt_tokens

    def start(self) -> SequenceStart:
        """Return the data that the executor needs to start the sequence."""
        request = self.request
        return SequenceStart(
            request.request_id,
            list(self.token_ids),
            self.prompt_tokens,
            request.sampling,
            self.digest,
            request.prompt_embeds,
            request.pooling,
            request.adapter_start,
            request.images,
            self.image_keys,
        )

    def step(self, tokens: int, draft: tuple[int, ...] = (), state: StateStep | None = None) -> SequenceStep:
        """Return the sequence's part of a plan, with all its new blocks.

        Args:
            tokens: number of tokens to compute, without the draft.
            draft: drafted tokens; see ``SequenceStep``.
            state: orders for its state; see ``SequenceStep``.
        """
        assert self.lease is not None
        blocks = self.lease.blocks
        known = self.sent_blocks
        new_blocks: tuple[BlockId, ...] = ()
        if known < len(blocks):
            new_blocks = tuple(blocks[known:])
            self.sent_blocks = len(blocks)
        request = self.request
        computed = self.computed_tokens
        samples = tokens == len(self.token_ids) - computed and request.pooling is None
        if not draft and state is None:  # as a rule
            return SequenceStep(request.request_id, computed, tokens, new_blocks, samples)
        return SequenceStep(request.request_id, computed, tokens + len(draft), new_blocks, samples, draft, state)

    def export(self) -> Request:
        """Return a request that resumes the sequence, in this or another engine."""
        made = self.token_ids[self.prompt_tokens :]
        sent = self.request.output_token_ids
        return msgspec.structs.replace(
            self.request,
            exports=self.request.exports + 1,
            output_token_ids=made if len(made) >= len(sent) else sent,
        )


class SchedulerStats(NamedTuple):
    """Counts the requests by state at one moment.

    Attributes:
        running: number of sequences that hold blocks and can run.
        waiting: number of all other requests.
        waiting_for_adapter: number of sequences that hold blocks and wait for their adapter.
        waiting_for_kv: number of sequences that hold blocks and wait only for KV.
        ahead_of_adapter: number of sequences whose assisted prefill is done and that wait for their adapter to decode.
    """

    running: int
    waiting: int
    waiting_for_adapter: int
    waiting_for_kv: int
    ahead_of_adapter: int

    @classmethod
    def of(cls, admitted: collections.abc.Sequence[Sequence], requests: int) -> "SchedulerStats":
        """Count requests by state.

        Args:
            admitted: sequences that hold blocks.
            requests: number of all requests.
        """
        others = [(s, s.lease) for s in admitted if s.lease is not None and not s.lease.is_ready]
        running = len(admitted) - len(others) + sum(s.is_cold for s, _ in others)
        return cls(
            running=running,
            waiting=requests - running,
            waiting_for_adapter=sum(bool(lease.adapter_transfers) and not s.is_cold for s, lease in others),
            waiting_for_kv=sum(bool(lease.kv_transfers) and not lease.adapter_transfers for _, lease in others),
            ahead_of_adapter=sum(s.waits_to_decode for s, _ in others),
        )


class OutputCollector:
    """Collects tokens and events until the engine takes them.

    Attributes:
        events: events in the order in which they happened.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenOutput] = []
        self.events: list[RequestEvent] = []
        self._waited_s = 0.0

    def take_waited_s(self) -> float:
        """Return the time for which the requests waited that had their first tokens since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def take(self) -> tuple[tuple[TokenOutput, ...], tuple[RequestEvent, ...]]:
        """Return the tokens and events since the last call."""
        taken = tuple(self._tokens), tuple(self.events)
        self._tokens = []
        self.events = []
        return taken

    def accept(
        self, sequence: Sequence, tokens: tuple[Token, ...], now: float
    ) -> tuple[FinishReason, int | None] | None:
        """Append sampled tokens to a sequence until a token ends it.

        Args:
            sequence: the sequence, changed in place.
            tokens: sampled tokens, in order.
            now: the time.

        Returns:
            Reason why the sequence has ended, and its stop token; None if it has not ended.
        """
        if not tokens:
            return None
        request = sequence.request
        token_ids = sequence.token_ids
        prompt_tokens = sequence.prompt_tokens
        sampling = request.sampling
        most = sequence.max_total_tokens
        stops = sampling.stop_token_ids
        known = len(token_ids)
        index = known - prompt_tokens
        finish: tuple[FinishReason, int | None] | None = None
        for token in tokens:
            token_id = token.token_id
            token_ids.append(token_id)
            known += 1
            if token_id in stops and known - prompt_tokens > sampling.min_tokens:
                finish = FinishReason.STOP, token_id
                break
            if known >= most:
                finish = FinishReason.LENGTH, None
                break
        made = known - prompt_tokens
        sent = len(request.output_token_ids)
        if index <= sent < made:  # ``sent`` exceeds ``index`` only while the sequence restarts
            self.events.append(FirstToken(request.request_id, now))
            self._waited_s += now - sequence.queued_s
        if made > sent:
            begin = index if index > sent else sent
            new = tokens if made - begin == len(tokens) else tokens[begin - index : made - index]
            self._tokens.append(TokenOutput(request.request_id, request.attempt, begin, new))
        return finish
