"""A request on its way through the engine: a count of computed tokens catching up with a total."""

from dataclasses import dataclass, field

import msgspec

from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart, SequenceStep
from lorikeet.core.request import Request
from lorikeet.memory.leases import SequenceLease


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
