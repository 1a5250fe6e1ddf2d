"""The scheduler's state: its limits, the sequences, how many are in which state, and the outputs not yet taken."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from lorikeet.core.events import FinishReason, FirstToken, RequestEvent
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.messages import TokenOutput
from lorikeet.core.plan import SequenceStart, SequenceStep, Token
from lorikeet.core.request import Request
from lorikeet.memory.blocks import SequenceLease


class SchedulerLimits(msgspec.Struct, frozen=True):
    """Bounds of a plan.

    Attributes:
        max_num_seqs: most sequences that hold blocks.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest sequence.
        num_scheduler_steps: most identical decode steps in one plan.
        multi_step_limit_s: a repeat ends after this time.
        async_scheduling: whether the executor returns after each step of a repeat, if it can with the next one under
            way. Then the two above hold while requests wait; plans for whom nobody waits are longer, unless
            ``num_scheduler_steps`` is 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_scheduler_steps: int = 1
    multi_step_limit_s: float = 0.05
    async_scheduling: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """What the engine knows of a request.

    There are no phases: prefill, chunk, decode and recompute all fall out of ``computed_tokens`` and
    ``len(token_ids)``.

    Attributes:
        request: as submitted or resumed.
        queued_s: when the scheduler took it in.
        most_tokens: that it may have, prompt and output.
        digest: of the request's adapter, None for the base model.
        token_ids: prompt and output so far.
        prompt_tokens: tokens of the prompt.
        computed_tokens: tokens whose KV is in its blocks.
        lease: its blocks, None while it waits.
        known_blocks: blocks of the lease that the executor has been told of.
        started: whether the executor knows it.
        keys: of its whole blocks in the memory's tree, when it was queued.
    """

    request: Request
    queued_s: float
    most_tokens: int
    digest: AdapterDigest | None = field(init=False)
    token_ids: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    computed_tokens: int = 0
    lease: SequenceLease | None = None
    known_blocks: int = 0
    started: bool = False
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin where it ended before."""
        self.digest = self.request.digest
        self.token_ids = self.request.prompt_token_ids + self.request.output_token_ids
        self.prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def request_id(self) -> RequestId:
        """Id of the request."""
        return self.request.request_id

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, here or elsewhere."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute until the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.most_tokens - len(self.token_ids)

    @property
    def is_ready(self) -> bool:
        """Whether it has its blocks, and all that it waited for has arrived."""
        return self.lease is not None and self.lease.is_ready

    @property
    def can_run(self) -> bool:
        """Whether it may be part of a step."""
        return self.is_ready or self.is_cold

    @property
    def is_cold(self) -> bool:
        """Whether it can prefill with the host's assistance, its adapter being on its way."""
        return self.lease is not None and self.lease.is_cold and not self.is_decoding

    @property
    def is_ahead(self) -> bool:
        """Whether its prefill is done and its adapter is still on its way, so that its first decode must wait."""
        return self.lease is not None and self.lease.is_cold and self.is_decoding

    @property
    def is_decoding(self) -> bool:
        """Whether the next token computed brings one more; its first token is always a step of its own."""
        return self.remaining_tokens == 1 and self.output_tokens > 0

    def start(self) -> SequenceStart:
        """Return what the executor must know of it."""
        request = self.request
        return SequenceStart(
            request.request_id, list(self.token_ids), self.prompt_tokens, request.sampling, self.digest
        )

    def step(self, tokens: int) -> SequenceStep:
        """Return its share of a plan; the executor knows all its blocks from then on.

        Args:
            tokens: that are computed.
        """
        assert self.lease is not None
        blocks, known = self.lease.blocks, self.known_blocks
        new_blocks: tuple[BlockId, ...] = ()
        if known < len(blocks):
            new_blocks, self.known_blocks = tuple(blocks[known:]), len(blocks)
        samples = tokens == self.remaining_tokens
        return SequenceStep(self.request.request_id, self.computed_tokens, tokens, new_blocks, samples)

    def export(self) -> Request:
        """Return it as plain data that continues here or elsewhere."""
        return msgspec.structs.replace(
            self.request,
            exports=self.request.exports + 1,
            output_token_ids=self.token_ids[self.prompt_tokens :],
        )


class SchedulerStats(NamedTuple):
    """Of one moment.

    Attributes:
        running: sequences that hold blocks and can run.
        waiting: all other requests.
        waiting_for_adapter: sequences that hold blocks and wait for their adapter.
        waiting_for_kv: those that hold blocks and wait for nothing but KV.
        ahead_of_adapter: those that wait for their adapter, and whose prefill is done all the same.
    """

    running: int
    waiting: int
    waiting_for_adapter: int
    waiting_for_kv: int
    ahead_of_adapter: int

    @classmethod
    def of(cls, admitted: Seq[Sequence], requests: int) -> "SchedulerStats":
        """Count them.

        Args:
            admitted: sequences that hold blocks.
            requests: in all.
        """
        running = sum(s.can_run for s in admitted)
        leases = [(s, s.lease) for s in admitted if s.lease is not None]
        return cls(
            running=running,
            waiting=requests - running,
            waiting_for_adapter=sum(bool(lease.adapter_transfers) and not s.is_cold for s, lease in leases),
            waiting_for_kv=sum(bool(lease.kv_transfers) and not lease.adapter_transfers for _, lease in leases),
            ahead_of_adapter=sum(s.is_ahead for s in admitted),
        )


class OutputCollector:
    """Collects them.

    Attributes:
        events: in the order in which they happened.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenOutput] = []
        self.events: list[RequestEvent] = []

    def take(self) -> tuple[tuple[TokenOutput, ...], tuple[RequestEvent, ...]]:
        """Return tokens and events since the last call."""
        taken = tuple(self._tokens), tuple(self.events)
        self._tokens, self.events = [], []
        return taken

    def accept(
        self, sequence: Sequence, tokens: tuple[Token, ...], now: float
    ) -> tuple[FinishReason, int | None] | None:
        """Append sampled tokens until one ends the request; return how it ended, and by which token, if it did.

        Args:
            sequence: which gets them.
            tokens: in their order.
            now: the time.
        """
        if not tokens:
            return None
        request, token_ids = sequence.request, sequence.token_ids
        stops, min_tokens = request.sampling.stop_token_ids, request.sampling.min_tokens
        index = made = sequence.output_tokens
        most = index + sequence.tokens_left
        finish: tuple[FinishReason, int | None] | None = None
        for token in tokens:
            token_ids.append(token.token_id)
            made += 1
            if token.token_id in stops and made > min_tokens:
                finish = FinishReason.STOP, token.token_id
                break
            if made >= most:
                finish = FinishReason.LENGTH, None
                break
        if index == len(request.output_token_ids):
            self.events.append(FirstToken(request.request_id, now))
        self._tokens.append(TokenOutput(request.request_id, request.attempt, index, tokens[: made - index]))
        return finish
