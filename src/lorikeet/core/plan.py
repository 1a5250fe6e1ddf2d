"""Step plans and their results: the values that pass between scheduler and executor."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.images import PromptImage
from lorikeet.core.request import Pooling, PromptEmbeds, SamplingParams


class KernelForm(StrEnum):
    """The way to compute the LoRA delta of a batch with mixed ranks."""

    UNPADDED = "unpadded"
    """Each adapter is computed at its rank. The work is the sum of the ranks."""
    PADDED = "padded"
    """Every adapter is padded to the largest rank of the batch."""
    EINSUM = "einsum"
    """Every adapter is padded, and every row is multiplied with every adapter (dLoRA's einsums over one-hot types)."""

    def fits_graphs(self, merged: AdapterDigest | None) -> bool:
        """Return whether decode steps can be CUDA graphs.

        Einsums wait for the device, so their steps cannot. Steps with a merged adapter can.
        """
        return self is not KernelForm.EINSUM or merged is not None


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the executor does not have, because it is new or was dropped.

    Attributes:
        request_id: the sequence's request.
        token_ids: the prompt, and tokens from before a preemption.
        prompt_tokens: number of prompt tokens in ``token_ids``.
        sampling: the sampling parameters.
        adapter: the adapter version; None for the base model.
        prompt_embeds: embeddings of the prompt's tokens; None for the embeddings of their ids.
        pooling: how to make a vector from the prompt; None if tokens are sampled.
        adapter_start: position of the first token on which the adapter acts.
        images: images of the prompt.
        image_keys: keys of their embeddings, see ``core.image_keys``.
    """

    request_id: RequestId
    token_ids: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    adapter: AdapterDigest | None
    prompt_embeds: PromptEmbeds | None = None
    pooling: Pooling | None = None
    adapter_start: int = 0
    images: tuple[PromptImage, ...] = ()
    image_keys: tuple[bytes, ...] = ()


class ImageStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image whose embeddings the executor computes before the step's forward pass, and keeps.

    Attributes:
        key: key of the embeddings, see ``core.image_keys``.
        request_id: a sequence of the step that has the image.
        number: index of the image among the sequence's.
        adapter: the adapter that changes the tower for it; None for the base's tower.
    """

    key: bytes
    request_id: RequestId
    number: int
    adapter: AdapterRef | None = None


class StateStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Orders for the state that a sequence carries from token to token; see ``core.states``.

    Attributes:
        blocks: blocks of the sequence's state, with its first step after an admission; else empty.
        load: blocks of a snapshot that is copied to the state before the step; empty for none.
        save: blocks to which the state is copied once ``save_at`` tokens are computed; empty for none.
        save_at: number of computed tokens at which the state is copied to ``save``.
    """

    blocks: tuple[BlockId, ...] = ()
    load: tuple[BlockId, ...] = ()
    save: tuple[BlockId, ...] = ()
    save_at: int = 0


class SequenceStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step.

    Attributes:
        request_id: the sequence's request.
        start: position of the first token computed; tokens before it are in its KV blocks.
        tokens: number of tokens computed from ``start`` on.
        new_blocks: blocks that are appended to the block table before the step.
        samples: whether the step yields a token: the last computed token is the newest one, and nothing is pooled.
        draft: drafted tokens that may follow the newest token. They are the last tokens of the step. The step yields a
            token after the newest one, and after each drafted token up to the first wrong one.
        state: orders for the sequence's state; None without any.
    """

    request_id: RequestId
    start: int
    tokens: int
    new_blocks: tuple[BlockId, ...]
    samples: bool
    draft: tuple[int, ...] = ()
    state: StateStep | None = None

    @property
    def known_tokens(self) -> int:
        """Number of computed tokens without drafted tokens."""
        return self.tokens - len(self.draft)

    def kept(self, tokens: tuple["Token", ...]) -> int:
        """Return the number of drafted tokens among the tokens that the step yielded."""
        pairs = zip(self.draft, tokens, strict=False)
        return next((at for at, (drafted, token) in enumerate(pairs) if drafted != token.token_id), len(self.draft))


class Tier(StrEnum):
    """A tier of memory or storage for blocks."""

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
        groups: see :class:`Transfer`. Empty if the prefill is not assisted.
        left_to_host: see :class:`Transfer`.
    """

    groups: Groups = ()
    left_to_host: tuple[int, int] = (0, 0)


PACKING_ORDER = LoadOrder()
"""Blocks in packing order, for prefills that are not assisted."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """A copy of blocks from one tier to another: the weights of an adapter, or KV.

    Weights from files to the device pass through ``host_blocks``, if given, and are on both tiers afterwards. Until the
    transfer is reported, its blocks are not written by others, and its target blocks are not read.

    Attributes:
        transfer_id: id that rises from transfer to transfer, so that completions of different transfers are not
            confused.
        source, target: the tiers.
        host_blocks: blocks in the host arena that are read, written, or passed through.
        device_blocks: blocks in the device arena, in the order of ``host_blocks``.
        adapter: adapter whose weights the blocks hold, in packing order; None for KV.
        demand: whether a request waits for the transfer. Demanded transfers run before prefetches.
        groups: ranges of blocks in load order. Empty if blocks are loaded in their order.
        left_to_host: layers, as (first, after the last), that the host computes while the adapter arrives, even if
            their blocks have arrived (static assistance).
        kept: number of leading blocks that are on the device already and are not copied. Only for transfers from the
            host to the device.
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
        error: why the transfer failed; None if it succeeded. After a failure the content of the target blocks is
            undefined.
        duration_s: seconds of reading and copying, without queueing; 0 if not measured.
    """

    transfer_id: int
    error: str | None = None
    duration_s: float = 0.0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything an executor needs for one step, or for ``repeat`` identical decode steps.

    Attributes:
        step: number of the plan, counting from 0.
        sequences: the sequences that run, with the number of tokens of each. Sequences of one adapter are consecutive.
        starts: sequences that are new to the executor.
        drops: sequences that the executor can forget (applied before ``starts``).
        adapters: adapter versions that ``sequences`` use, each once, without the base.
        transfers: transfers that start with this step. Equally urgent transfers run in this order.
        urgent: earlier prefetches for which a request waits now.
        evictions: adapter versions whose device blocks were freed (applied before ``transfers``).
        kernel_form: how mixed ranks are computed.
        merged: adapter whose weights are merged into the base; None without one.
        repeat: number of identical decode steps. It is above 1 only if every sequence decodes.
        max_duration_s: seconds after which the executor ends a repeat early.
        assisted: the ``adapters`` whose transfer from the host is in flight. Their sequences prefill, and host
            workers compute the LoRA delta on layers that have not arrived.
        overlapped: whether the executor returns after one step, if possible with the next step running (async
            scheduling).
        images: images to compute before the step.
        dropped_images: keys of embeddings that the executor forgets (applied before ``images``).
        continues: whether the first step is the running step of the last plan with sequences. Some of its sequences may
            have ended since. If the next plan with sequences does not continue, the running step is discarded.
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
    images: tuple[ImageStep, ...] = ()
    dropped_images: tuple[bytes, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the executor has nothing to do."""
        return not (self.sequences or self.drops or self.transfers or self.urgent or self.evictions)

    @property
    def fits_graphs(self) -> bool:
        """Whether the plan can run as a CUDA graph, since all sequences decode and the kernel form allows it."""
        decodes = all(step.tokens == 1 and step.samples for step in self.sequences)
        return decodes and self.kernel_form.fits_graphs(self.merged) and not self.assisted


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled token.

    Attributes:
        token_id: index in the vocabulary.
        logprob: the token's log probability under the unmodified distribution, if requested.
        top: most likely (token id, log probability) pairs, if requested.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PromptToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The probability of a token of a prompt.

    Attributes:
        token_id: index in the vocabulary.
        logprob: the token's log probability after the tokens before it.
        rank: number of tokens that are at least as likely, the token itself included.
        top: the most likely (token id, log probability) pairs at its position.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Probabilities of consecutive tokens of a prompt.

    Attributes:
        request_id: the request.
        position: position of the first token.
        tokens: the tokens' probabilities, in order.
    """

    request_id: RequestId
    position: int
    tokens: tuple[PromptToken, ...]


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The vector of a request with ``pooling``.

    Attributes:
        request_id: the request.
        data: the vector's numbers in fp32, little-endian.
    """

    request_id: RequestId
    data: bytes


NOT_FINITE = "the model's output is not finite"
"""Reason for which a request has no token that is not the request's own fault."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a plan.

    Attributes:
        step: number of the plan.
        tokens: for each sequence of the plan, the sampled tokens, the oldest first.
        steps_run: number of ``repeat`` steps that ran.
        duration_s: seconds that the executor took. For a plan that continues, seconds since the previous step ended.
        failed: requests for which no token could be sampled, with the reason: ``NOT_FINITE``, or the part of the
            request that leaves no token. The other results are valid.
        switch_s: the part of ``duration_s`` spent merging or unmerging an adapter.
        next_runs: whether the plan's next step is already running (async scheduling).
        prompt_logprobs: logprobs of the prompt tokens after the computed ones, for requests that need them.
        pooled: vectors of requests that need one and whose prompt has been computed.
        tower_s: the part of ``duration_s`` spent on the plan's images.
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
    tower_s: float = 0.0
