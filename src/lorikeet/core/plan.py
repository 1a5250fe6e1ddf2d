"""Step plans and their results: the values that pass between scheduler and executor."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.request import Pooling, PromptEmbeds, SamplingParams


class KernelForm(StrEnum):
    """How the LoRA delta of a batch with mixed ranks is computed."""

    UNPADDED = "unpadded"
    """Each adapter at its own rank: the work is the sum of the ranks."""
    PADDED = "padded"
    """Every adapter padded to the largest rank of the batch."""
    EINSUM = "einsum"
    """Padded, and every row is multiplied with every adapter of the batch (dLoRA's einsums over one-hot types)."""

    def fits_graphs(self, merged: AdapterDigest | None) -> bool:
        """Return whether decode steps can be CUDA graphs.

        Steps with einsums cannot, since these wait for the device; steps with a merged adapter can.
        """
        return self is not KernelForm.EINSUM or merged is not None


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that is new to the executor, or that it has dropped before.

    Attributes:
        request_id: the sequence's request.
        token_ids: prompt and the tokens of earlier attempts.
        prompt_tokens: how many of ``token_ids`` are prompt.
        sampling: how tokens are chosen.
        adapter: adapter version, None for the base model.
        prompt_embeds: embeddings of the prompt's tokens; None for the embeddings of their ids.
        pooling: how one vector is made of its prompt, None if tokens are sampled.
        adapter_start: position of the first token on which the adapter acts.
    """

    request_id: RequestId
    token_ids: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    adapter: AdapterDigest | None
    prompt_embeds: PromptEmbeds | None = None
    pooling: Pooling | None = None
    adapter_start: int = 0


class SequenceStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step.

    Attributes:
        request_id: the sequence's request.
        start: position of the first token computed; tokens before it are in its KV blocks.
        tokens: how many tokens are computed from ``start``.
        new_blocks: appended to its block table before the step.
        samples: whether the step yields a token: the last computed token is the newest one, and nothing is pooled.
        draft: tokens that may follow the newest one; they are the last tokens of the step. The step yields a token
            after the newest one, and after each drafted one as long as it yields the drafted tokens.
    """

    request_id: RequestId
    start: int
    tokens: int
    new_blocks: tuple[BlockId, ...]
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def known_tokens(self) -> int:
        """Number of computed tokens without the drafted ones."""
        return self.tokens - len(self.draft)

    def kept(self, tokens: tuple["Token", ...]) -> int:
        """Return how many drafted tokens are among the tokens that the step yielded."""
        pairs = zip(self.draft, tokens, strict=False)
        return next((at for at, (drafted, token) in enumerate(pairs) if drafted != token.token_id), len(self.draft))


class Tier(StrEnum):
    """A place for blocks."""

    DEVICE = "device"
    """The device arena, which steps read."""
    HOST = "host"
    """The host arena, in shared memory."""
    SOURCE = "source"
    """An adapter's files."""


Groups = tuple[tuple[int, int], ...]
"""Ranges of indices of a transfer's blocks, each (first, after the last)."""


class LoadOrder(NamedTuple):
    """The order in which an adapter is loaded for an assisted prefill.

    Attributes:
        groups: see :class:`Transfer`; empty if the prefill is not assisted.
        left_to_host: see :class:`Transfer`.
    """

    groups: Groups = ()
    left_to_host: tuple[int, int] = (0, 0)


PACKING_ORDER = LoadOrder()
"""Blocks in packing order, for prefills that are not assisted."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """A copy of blocks from one tier to another: the weights of an adapter, or KV.

    Weights that go from the source to the device pass through ``host_blocks``, if there are any, and then are in both.
    Until the transfer is reported, nothing else writes its blocks, and nothing reads the blocks that it writes.

    Attributes:
        transfer_id: rises from transfer to transfer, so that a completion is not taken for a later transfer's.
        source, target: tiers.
        host_blocks: blocks in the host arena: read, written, or passed through.
        device_blocks: blocks in the device arena, in the order of ``host_blocks``.
        adapter: adapter whose weights the blocks hold, in packing order; None for KV.
        demand: whether a request waits for it. Demanded transfers run before prefetches.
        groups: ranges of blocks in load order; empty: in the order of the blocks.
        left_to_host: layers, as (first, after the last), that the host computes while the adapter arrives, even if
            their blocks have arrived (static assistance).
        kept: number of leading blocks that are on the device already and are not copied; from the host to the device
            only.
    """

    transfer_id: int
    source: Tier
    target: Tier
    host_blocks: tuple[BlockId, ...] = ()
    device_blocks: tuple[BlockId, ...] = ()
    adapter: AdapterRef | None = None
    demand: bool = True
    groups: Groups = ()
    left_to_host: tuple[int, int] = (0, 0)
    kept: int = 0


class TransferDone(msgspec.Struct, frozen=True, array_like=True):
    """The end of a :class:`Transfer` on every rank.

    Attributes:
        transfer_id: the transfer.
        error: why it failed, None if it succeeded. After a failure the content of the target blocks is undefined.
        duration_s: seconds of reading and copying, without queueing; 0 if not measured.
    """

    transfer_id: int
    error: str | None = None
    duration_s: float = 0.0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything an executor needs for one step, or for ``repeat`` identical decode steps.

    Attributes:
        step: number of the plan, counting from 0.
        sequences: which sequences run, and how many tokens each. Sequences of one adapter are consecutive.
        starts: sequences that are new to the executor.
        drops: sequences that the executor can forget (applied before ``starts``).
        adapters: adapter versions used by ``sequences``, each once, base excluded.
        transfers: transfers that start with this step; equally urgent ones run in this order.
        urgent: earlier prefetches that a request waits for now.
        evictions: adapter versions whose device blocks were freed (applied before ``transfers``).
        kernel_form: how mixed ranks are computed.
        merged: adapter whose weights are merged into the base, None while unmerged.
        repeat: number of identical decode steps; above 1 only if every sequence decodes.
        max_duration_s: the executor ends a repeat early after this time.
        assisted: the ``adapters`` whose transfer from the host is in flight. Their sequences prefill, and host
            workers compute the LoRA delta on layers that have not arrived.
        overlapped: async scheduling: the executor returns after one step, if possible with the next one running.
        continues: the first step is the one that runs already, of the last plan with sequences; some of its sequences
            may have ended since. If the next plan with sequences does not continue, the running step is discarded.
    """

    step: int
    sequences: tuple[SequenceStep, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    drops: tuple[RequestId, ...] = ()
    adapters: tuple[AdapterDigest, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    urgent: tuple[int, ...] = ()
    evictions: tuple[AdapterDigest, ...] = ()
    kernel_form: KernelForm = KernelForm.UNPADDED
    merged: AdapterDigest | None = None
    repeat: int = 1
    max_duration_s: float = 0.05
    assisted: tuple[AdapterDigest, ...] = ()
    overlapped: bool = False
    continues: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the executor has nothing to do."""
        return not (self.sequences or self.drops or self.transfers or self.urgent or self.evictions)

    @property
    def fits_graphs(self) -> bool:
        """Whether the plan can run as a CUDA graph: all sequences decode, and the kernel form allows it."""
        decodes = all(step.tokens == 1 and step.samples for step in self.sequences)
        return decodes and self.kernel_form.fits_graphs(self.merged) and not self.assisted


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled token.

    Attributes:
        token_id: index in the vocabulary.
        logprob: its log probability under the unmodified distribution, if requested.
        top: most likely (token id, log probability) pairs, if requested.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PromptToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The probability of a token of a prompt.

    Attributes:
        token_id: index in the vocabulary.
        logprob: its log probability after the tokens before it.
        rank: number of tokens that are at least as likely as it, itself included.
        top: most likely (token id, log probability) pairs in its place.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Probabilities of consecutive tokens of a prompt.

    Attributes:
        request_id: which request.
        position: position of the first token.
        tokens: in order.
    """

    request_id: RequestId
    position: int
    tokens: tuple[PromptToken, ...]


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The vector of a request with ``pooling``.

    Attributes:
        request_id: which request.
        data: its numbers in fp32, little-endian.
    """

    request_id: RequestId
    data: bytes


NOT_FINITE = "the model's output is not finite"
"""Reason for which a request has no token that is not the request's own fault."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a plan.

    Attributes:
        step: number of the plan.
        tokens: for each sequence of the plan, the tokens sampled, oldest first.
        steps_run: how many of ``repeat`` steps ran.
        duration_s: seconds that the executor took; of a plan that continues, since the previous step ended.
        failed: requests for which no token could be sampled, and why: ``NOT_FINITE``, or what in the request leaves no
            token. The others are valid.
        switch_s: the part of ``duration_s`` spent merging or unmerging an adapter.
        next_runs: whether the next step of the plan runs already (async scheduling).
        prompt_logprobs: logprobs of the prompt tokens after the computed ones, for requests that need them.
        pooled: vectors of requests that need one and whose prompt has been computed.
    """

    step: int
    tokens: tuple[tuple[Token, ...], ...]
    steps_run: int
    duration_s: float
    failed: dict[RequestId, str] = {}
    switch_s: float = 0.0
    next_runs: bool = False
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()
