"""One step, one plan: the values that pass between scheduler and executor (design, idea 4)."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.request import SamplingParams


class KernelForm(StrEnum):
    """How a batch of mixed ranks is computed."""

    UNPADDED = "unpadded"
    """Work is the sum of the ranks in the batch."""
    PADDED = "padded"
    """Work is the largest rank of the batch for every adapter in it."""
    EINSUM = "einsum"
    """As padded, and every row meets every adapter of the batch (dLoRA's einsums over one-hot types)."""

    def fits_graphs(self, merged: AdapterDigest | None) -> bool:
        """Whether steps that decode can be graphs: einsums wait for the device, but a merged adapter needs none."""
        return self is not KernelForm.EINSUM or merged is not None


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """What the executor must know of a sequence that it has not seen yet (or has dropped).

    Attributes:
        request_id: the sequence's request.
        token_ids: prompt and the tokens of earlier attempts.
        prompt_tokens: how many of ``token_ids`` are prompt.
        sampling: how tokens are chosen.
        adapter: adapter version, None for the base model.
    """

    request_id: RequestId
    token_ids: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    adapter: AdapterDigest | None


class SequenceStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step.

    Attributes:
        request_id: the sequence's request.
        start: position of the first token computed; tokens before it are in its KV blocks.
        tokens: how many tokens are computed from ``start``.
        new_blocks: appended to its block table before the step.
        samples: whether the last computed token is the newest one, so that the step yields a token.
    """

    request_id: RequestId
    start: int
    tokens: int
    new_blocks: tuple[BlockId, ...]
    samples: bool


class Tier(StrEnum):
    """Where bytes can be."""

    DEVICE = "device"
    """The arena that steps read."""
    HOST = "host"
    """An arena in shared memory beside it."""
    SOURCE = "source"
    """An adapter's files."""


Groups = tuple[tuple[int, int], ...]
"""Runs of a transfer's blocks, each from an index to another (half-open)."""


class Order(NamedTuple):
    """How an adapter is to arrive whose prefill is assisted.

    Attributes:
        groups: see :class:`Transfer`; none: it is not assisted.
        left_to_host: the same.
    """

    groups: Groups = ()
    left_to_host: tuple[int, int] = (0, 0)


AS_THEY_LIE = Order()
"""Blocks as they lie; nobody computes with a part of them."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks on their way from one tier to another: the weights of an adapter, or KV.

    From the source to the device weights go by way of ``host_blocks``, where there are any, and then lie in both.
    Blocks belong to the transfer until it is reported: nobody else writes them, and those it writes nobody reads.

    Attributes:
        transfer_id: rises from one to the next, and fences a completion against a later transfer of the same blocks.
        source, target: tiers.
        host_blocks: in the host arena: read, written, or passed through.
        device_blocks: in the device arena, in the order of ``host_blocks``.
        adapter: whose weights they are, in packing order; None for KV.
        demand: whether somebody waits for it. Such transfers go first.
        groups: in the order in which they are to arrive; none: as the blocks lie.
        left_to_host: first layer, and the one after the last, that nobody waits for while the adapter arrives: the host
            computes them in any case, also if a block that they share with others is there.
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


class TransferDone(msgspec.Struct, frozen=True, array_like=True):
    """The end of a :class:`Transfer` on every rank.

    Attributes:
        transfer_id: which.
        error: why it failed, None if it did not. Nothing is known then of what it should have written.
        duration_s: time that reading and copying took, without waiting for its turn; 0 if nobody measured it.
    """

    transfer_id: int
    error: str | None = None
    duration_s: float = 0.0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything an executor needs for one step, or for ``repeat`` identical decode steps.

    Attributes:
        step: number of the plan, counting from 0.
        sequences: who runs, and how many tokens each. Sorted so that equal adapters are neighbours.
        starts: sequences the executor meets for the first time.
        drops: sequences it may forget (applied before ``starts``).
        adapters: adapter versions used by ``sequences``, each once, base excluded.
        transfers: those that start with this step, in the order in which equally urgent ones are to run.
        urgent: earlier transfers that somebody waits for by now.
        evictions: adapter versions whose device blocks were given up (applied before ``transfers``).
        kernel_form: how mixed ranks are computed.
        merged: adapter whose weights are merged into the base, None while unmerged.
        repeat: number of identical decode steps; above 1 only if every sequence decodes.
        max_duration_s: the executor ends a repeat early after this time.
        assisted: of ``adapters``, those that are still on their way from the host. Sequences under them prefill, and
            on layers that have not arrived host workers compute what they add.
        overlapped: whether the executor returns after one step, if it can with the next one under way.
        goes_on: its first step is that one, of the last plan with sequences; some of these may have left since. If the
            next plan with sequences does not go on, nobody wants it any more.
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
    goes_on: bool = False

    @property
    def is_empty(self) -> bool:
        """True if the executor has nothing at all to do."""
        return not (self.sequences or self.drops or self.transfers or self.urgent or self.evictions)

    @property
    def fits_graphs(self) -> bool:
        """Whether all sequences decode, and adapters are computed by kernels that fit graphs, or are merged."""
        decodes = all(step.tokens == 1 and step.samples for step in self.sequences)
        return decodes and self.kernel_form.fits_graphs(self.merged) and not self.assisted


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled token.

    Attributes:
        token_id: index in the vocabulary.
        logprob: its log probability under the unmodified distribution, if asked for.
        top: most likely (token id, log probability) pairs, if asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought.

    Attributes:
        step: number of the plan.
        tokens: for each sequence of the plan, the tokens sampled, oldest first.
        steps_run: how many of ``repeat`` steps ran.
        duration_s: time the executor took; of a plan that goes on, since the last step ended.
        failed: requests whose logits were not finite, so that no token could be chosen; the others are sound.
        switch_s: the part of ``duration_s`` in which another adapter, or none, was merged into the base weights.
        next_runs: whether the next of the plan's steps runs already.
    """

    step: int
    tokens: tuple[tuple[Token, ...], ...]
    steps_run: int
    duration_s: float
    failed: tuple[RequestId, ...] = ()
    switch_s: float = 0.0
    next_runs: bool = False
