"""Samples tokens from logits: edits logits on the host for requests that need it, and calls ``Kernels.choose``.

The order is: raw log probabilities to report (of the unmodified distribution), bias, penalties, forbidden tokens (by
``allowed_token_ids``, ``bad_words``, ``min_tokens`` and the grammar), and then, in ``Kernels.choose``, temperature,
min-p, top-k, top-p, noise. Processed log probabilities are those before the noise. vLLM's V1 sampler has the same
order, except that it forbids tokens before the penalties.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorikeet.core.plan import NOT_FINITE, Token
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.sampling import GREEDY_BELOW, SamplingTensors, lowest_kept
from lorikeet.worker.batch import GrowingInts, Ints
from lorikeet.worker.grammars import GrammarMasks, Masks

_NONE_ALLOWED = "no token may come next: allowed_token_ids, bad_words, logit_bias and the grammar leave none"

Choose = Callable[[Tensor, SamplingTensors], Tensor]
"""``Kernels.choose``."""


class Sampled(Protocol):
    """The part of a sequence that the sampler uses.

    Attributes:
        sampling: the sequence's sampling parameters.
        token_ids: prompt and outputs so far. The number of ids is the position of the new token.
        prompt_tokens: number of prompt tokens in ``token_ids``.
        embedded_tokens: number of leading tokens that are given as embeddings, so that their ids mean nothing.
    """

    sampling: SamplingParams
    token_ids: GrowingInts
    prompt_tokens: int

    @property
    def embedded_tokens(self) -> int:
        """Number of leading ids that mean nothing."""
        ...

    @property
    def origin(self) -> "Sampled":
        """The sequence itself, without drafted tokens."""
        ...


class Bias(NamedTuple):
    """A logit bias. ``values`` (fp32) are added to the logits of ``token_ids`` (int64), which may repeat."""

    token_ids: Ints
    values: NDArray[np.float32]


class _Prepared(NamedTuple):
    """The parts of sampling that stay the same for the sequences of a batch from step to step.

    Attributes:
        sequences: sequences in the order of their logits.
        chosen: sampling parameters of all rows. Edited rows are greedy in it, since this first call only checks that
            their logits are finite.
        edited: rows whose logits are edited, ascending.
        chosen_edited: sampling parameters of the edited rows. None without edited rows.
        biases: the logit biases of the edited rows.
        held: edited rows that need no edit any more once their answers have ``min_tokens`` tokens.
        masked: rows whose answers follow a grammar, ascending.
        masked_only: rows with a grammar but no other edit, if the logits are in host memory. These rows do not count as
            edited, since their logits are changed in place.
        reported: rows that report log probabilities.
    """

    sequences: tuple[Sampled, ...]
    chosen: SamplingTensors
    edited: tuple[int, ...]
    chosen_edited: SamplingTensors | None
    biases: tuple[Bias, ...]
    held: tuple[int, ...]
    masked: tuple[int, ...]
    masked_only: tuple[int, ...]
    reported: tuple[int, ...]


class Sampler:
    """Samples tokens, step by step.

    The same sequences decode together for many steps, so tensors of their parameters are built only when the batch
    changes.

    Args:
        choose: ``Kernels.choose``.
        grammars: the masks for sequences with a grammar. None if no sequence has a grammar.
    """

    def __init__(self, choose: Choose, grammars: GrammarMasks | None = None) -> None:
        self._choose = choose
        self._grammars = grammars
        self._masks: Future[Masks] | None = None
        self._forced: dict[int, tuple[int, ...]] = {}
        self._rows = _prepare((), in_place=False)

    def begin(self, sequences: Sequence[Sampled]) -> None:
        """Begin to compute the masks for the next :meth:`sample`, so that masks and logits are ready at the same time.

        Args:
            sequences: the sequences of the next :meth:`sample`. Their tokens must not change until then.
        """
        masked = [sequences[i] for i in self._rows_of(sequences).masked]
        if masked:
            assert self._grammars is not None, "a request has a grammar, and this executor has no masks"
            self._masks = self._grammars.begin(masked)

    def sample(
        self, logits: Tensor, sequences: Sequence[Sampled], chosen: list[int] | None = None
    ) -> list[Token | str]:
        """Sample one token per row, or return the reason if the row's largest logit is not finite.

        Args:
            logits: ``[S, vocab]`` of any floating dtype. In host memory, the logits of rows with a grammar are changed
                in place.
            sequences: the sequences in the order of the logits. If a sequence has a grammar, :meth:`begin` must have
                been called with the same sequences.
            chosen: the result of ``choose`` with :meth:`parameters`, if the caller has it already.
        """
        if not sequences:
            return []
        rows = self._rows_of(sequences)
        positions = [len(sequence.token_ids) for sequence in sequences]
        addends, masks = self._take_masks(logits)
        unmasked = {i: logits[i].clone() for i in rows.masked_only if i in rows.reported}
        with torch.inference_mode():  # The logits are inference tensors.
            if addends is not None and len(rows.masked_only) == len(sequences):
                logits += addends
            else:
                for i in rows.masked_only:
                    logits[i].add_(masks[i][0])  # The operator += would also copy the row back.
        if chosen is None:
            rows.chosen.position.numpy()[:] = positions
            chosen = self._choose(logits, rows.chosen.on(logits.device)).tolist()
        token_ids = list(chosen)
        reasons: dict[int, str] = {}
        edited: Tensor | None = None
        if rows.chosen_edited is not None:
            rows.chosen_edited.position.numpy()[:] = [positions[i] for i in rows.edited]
            edited = logits[to_device(torch.tensor(rows.edited), logits.device)].float()
            for edited_row, i, bias in zip(edited, rows.edited, rows.biases, strict=True):
                mask, is_end = masks.get(i, (None, False))
                edit_logits(edited_row, sequences[i], bias, is_end=is_end)
                if mask is not None:
                    edited_row += mask
            chosen_edited = self._choose(edited, rows.chosen_edited.on(logits.device))
            for i, token_id in zip(rows.edited, chosen_edited.tolist(), strict=True):
                if token_ids[i] >= 0:
                    token_ids[i] = token_id
                    reasons[i] = self._grammar_error(sequences[i]) or _NONE_ALLOWED
        for i in rows.masked_only:
            reasons[i] = self._grammar_error(sequences[i]) or NOT_FINITE
        tokens = [
            Token(token_id) if token_id >= 0 else reasons.get(i, NOT_FINITE) for i, token_id in enumerate(token_ids)
        ]
        reported = [i for i in rows.reported if token_ids[i] >= 0]
        wanted = [(token_ids[i], sequences[i].sampling) for i in reported]
        told = []
        for i in reported:
            params = sequences[i].sampling
            if not params.processed_logprobs:
                told.append(unmasked[i] if i in unmasked else logits[i])
            elif edited is not None and i in rows.edited:
                told.append(_processed(edited[rows.edited.index(i)], params))
            else:
                told.append(_processed(logits[i], params))
        for i, token in zip(reported, _with_logprobs(told, wanted), strict=True):
            tokens[i] = token
        return tokens

    def take_forced(self) -> dict[int, tuple[int, ...]]:
        """Return, by row, the tokens that grammars force after the tokens of the last :meth:`sample`."""
        forced = self._forced
        self._forced = {}
        return forced

    def parameters(self, sequences: Sequence[Sampled]) -> SamplingTensors:
        """Return the sampling parameters without positions. Rows with edited logits are greedy in the result."""
        return self._rows_of(sequences).chosen

    def needs_only_choose(self, sequences: Sequence[Sampled]) -> bool:
        """Whether these sequences need no edits and no log probabilities, so that ``choose`` alone samples them."""
        rows = self._rows_of(sequences)
        return not (rows.edited or rows.masked or rows.reported)

    def _grammar_error(self, sequence: Sampled) -> str:
        return self._grammars.error(sequence) if self._grammars is not None and sequence.sampling.grammar else ""

    def _take_masks(self, logits: Tensor) -> tuple[Tensor | None, dict[int, tuple[Tensor, bool]]]:
        """Return the addends for the logits of all rows with a grammar, and the addends by row with ``Masks.end``."""
        pending = self._masks
        self._masks = None
        if pending is None:
            return None, {}
        masks = pending.result()
        self._forced = {i: forced for i, forced in zip(self._rows.masked, masks.forced, strict=True) if forced}
        addends = masks.addends_for(logits)
        return addends, dict(zip(self._rows.masked, zip(addends, masks.end, strict=True), strict=True))

    def _rows_of(self, sequences: Sequence[Sampled]) -> _Prepared:
        last = self._rows
        is_same = len(last.sequences) == len(sequences) and all(map(is_, last.sequences, sequences))
        if not is_same or not all(_is_held(sequences[i]) for i in last.held):
            self._rows = _prepare(sequences, in_place=self._grammars is not None and self._grammars.on_host)
        return self._rows


def bias_of(params: SamplingParams) -> Bias:
    """Return ``params.logit_bias`` as arrays."""
    token_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
    return Bias(token_ids, np.array([addend for _, addend in params.logit_bias], dtype=np.float32))


def edit_logits(logits: Tensor, sequence: Sampled, bias: Bias, *, is_end: bool = False) -> None:
    """Apply all edits but the grammar's to one row's fp32 ``logits [vocab]``, in place.

    Token ids outside the vocabulary have no effect. With ``is_end`` the grammar allows only stop tokens, so
    ``min_tokens`` has no effect.
    """
    params = sequence.sampling
    token_ids = sequence.token_ids.values
    outputs = token_ids[sequence.prompt_tokens :]
    if len(bias.token_ids):
        addends = bias.values[_is_within(bias.token_ids, logits)]
        logits.index_add_(0, _indices(bias.token_ids, logits), _values(addends, logits))
    if params.repetition_penalty != 1.0:
        seen = _indices(np.unique(token_ids[sequence.embedded_tokens :]), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(outputs):
        ids, counts = np.unique(outputs, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts[_is_within(ids, logits)]
        logits[_indices(ids, logits)] -= _values(penalty, logits)
    # Tokens are forbidden last, since a penalty of 0 would turn -inf into NaN.
    if params.allowed_token_ids:
        allowed = _indices(np.array(params.allowed_token_ids, dtype=np.int64), logits)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    for word in params.bad_words:
        *begin, last = word
        if outputs[max(0, len(outputs) - len(begin)) :].tolist() == begin:
            logits[_indices(np.array([last], dtype=np.int64), logits)] = -torch.inf
    if _is_held(sequence) and not is_end:
        logits[_indices(np.array(params.stop_token_ids, dtype=np.int64), logits)] = -torch.inf


def _prepare(sequences: Sequence[Sampled], *, in_place: bool) -> _Prepared:
    all_params = [sequence.sampling for sequence in sequences]
    always = {i for i, params in enumerate(all_params) if _edits(params)}
    held = {i for i, sequence in enumerate(sequences) if _is_held(sequence)} - always
    masked = tuple(i for i, params in enumerate(all_params) if params.grammar)
    masked_only = tuple(i for i in masked if in_place and i not in always | held)
    edited = tuple(sorted(always | held | set(masked) - set(masked_only)))
    chosen = _parameters(all_params)
    chosen_edited = None
    if edited:
        chosen_edited = SamplingTensors(*(values[list(edited)] for values in chosen))
        chosen.temperature[list(edited)] = 0.0
    reported = tuple(i for i, params in enumerate(all_params) if params.logprobs is not None)
    biases = tuple(bias_of(all_params[i]) for i in edited)
    return _Prepared(
        tuple(sequences), chosen, edited, chosen_edited, biases, tuple(held), masked, masked_only, reported
    )


def _parameters(all_params: Sequence[SamplingParams]) -> SamplingTensors:
    seeds = np.array([params.seed & (2**64 - 1) for params in all_params], dtype=np.uint64)
    return SamplingTensors(
        temperature=torch.tensor([params.temperature for params in all_params], dtype=torch.float32),
        top_k=torch.tensor([params.top_k for params in all_params], dtype=torch.int64),
        top_p=torch.tensor([params.top_p for params in all_params], dtype=torch.float32),
        min_p=torch.tensor([params.min_p for params in all_params], dtype=torch.float32),
        seed=torch.from_numpy(seeds.view(np.int64)),
        position=torch.zeros(len(all_params), dtype=torch.int64),
    )


def _edits(params: SamplingParams) -> bool:
    """Whether logits are edited on every step, by more than a grammar."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.allowed_token_ids
        or params.bad_words
    )


def _is_held(sequence: Sampled) -> bool:
    """Whether ``min_tokens`` still forbids stop tokens."""
    params = sequence.sampling
    return bool(params.stop_token_ids) and len(sequence.token_ids) - sequence.prompt_tokens < params.min_tokens


def _processed(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the logits of the distribution that one row was sampled from, in fp32; ``-inf`` for filtered tokens.

    A greedy row is not scaled or filtered: its temperature has no distribution.

    Args:
        logits: ``[vocab]``, edited and masked.
        params: parameters of the row.
    """
    logits = logits.float()
    if params.temperature < GREEDY_BELOW:
        return logits
    scaled = (logits - logits.max()) / params.temperature
    scaled = torch.where(scaled.isnan(), -torch.inf, scaled)
    lowest = lowest_kept(scaled, params.top_k, params.top_p, params.min_p)
    return torch.where(scaled >= lowest, scaled, -torch.inf)


def _with_logprobs(rows: Sequence[Tensor], wanted: Sequence[tuple[int, SamplingParams]]) -> list[Token]:
    """Return tokens with log probabilities.

    The work for all rows is queued before the host waits for the device. Each row is computed separately, since torch
    sums the rows of a batch in another order, which changes the last digits.

    Args:
        rows: the logits ``[vocab]`` of each row.
        wanted: the sampled token of each row, and the log probabilities to report.
    """
    if not rows:
        return []
    of_chosen = []
    best_ids = []
    best_values = []
    for row, (token_id, params) in zip(rows, wanted, strict=True):
        logprobs = row.float().log_softmax(dim=-1)
        of_chosen.append(logprobs[token_id])
        if params.logprob_token_ids:
            named = np.array([token_id, *(each for each in params.logprob_token_ids if each != token_id)])
            indices = _indices(named, logprobs)
            values = logprobs[indices]
        else:
            values, indices = logprobs.topk(min(params.logprobs or 0, len(logprobs)))
        best_ids.append(indices)
        best_values.append(values)
    all_ids = iter(torch.cat(best_ids).tolist())
    all_values = iter(torch.cat(best_values).tolist())
    return [
        Token(token_id, logprob, tuple(islice(zip(all_ids, all_values, strict=True), len(values))))
        for (token_id, _), logprob, values in zip(wanted, torch.stack(of_chosen).tolist(), best_values, strict=True)
    ]


def _is_within(ids: Ints, logits: Tensor) -> NDArray[np.bool_]:
    return (ids >= 0) & (ids < len(logits))


def _indices(ids: Ints, logits: Tensor) -> Tensor:
    return to_device(torch.from_numpy(ids[_is_within(ids, logits)]), logits.device)


def _values(values: NDArray[Any], logits: Tensor) -> Tensor:
    return to_device(torch.from_numpy(values).to(logits.dtype), logits.device)
