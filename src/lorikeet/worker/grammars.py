"""Compiles grammars, keeps a matcher for each sequence, and computes masks of the tokens that may come next.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing. Grammars are compiled on one thread. Masks are
computed on another thread while the device computes the logits that they apply to. The state of a matcher follows from
the output tokens of its sequence. A resumed sequence gets a new matcher, which reads its output tokens again.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from lorikeet.core.grammar_tokenizer import without_special_texts
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.devices import to_device
from lorikeet.worker.batch import GrowingInts

MAX_LEXER_STATES = 20_000
"""Of one sequence; a state takes 1 to 2 kB."""
_MAX_COMPILED = 256
"""Grammars that are kept compiled. Most take some hundred kilobytes."""
_STACK_BYTES = 64 * 2**20
"""llguidance recurses along rules that refer to each other; the API's check has a smaller stack."""
_MAX_FORCED = 32
"""Most forced tokens of a step; the next step computes them like a part of a prompt."""
_MAX_MASK_S = 1.0
"""Most time of a core for one mask, on which all sequences of the step wait; then its sequence ends with an error."""

Result = TypeVar("Result")


class GrammarError(ValueError):
    """A grammar cannot be compiled, or the tokens that may come next cannot be computed."""


class SingleThread:
    """Runs tasks in order, on a thread with a large stack.

    Args:
        name: name of the thread.
        stack_bytes: size of its stack.
    """

    def __init__(self, name: str, stack_bytes: int = _STACK_BYTES) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        usual = threading.stack_size(stack_bytes)
        try:
            self.submit(int).result()  # The thread starts with the first task.
        finally:
            threading.stack_size(usual)

    def submit(self, task: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Queue a task."""
        return self._executor.submit(task, *args)

    def close(self) -> None:
        """Drop the tasks that have not begun, and wait for the running task."""
        self._executor.shutdown(cancel_futures=True)


class GrammarCompiler:
    """Compiles grammars on a separate thread and caches the results.

    Args:
        tokenizer_file: the model's ``tokenizer.json``, which is read when a grammar first needs it.
        vocabulary: width of the logits.
        eos_token_ids: tokens that may follow a complete answer.
    """

    def __init__(self, tokenizer_file: Path, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self._file = tokenizer_file
        self._eos = [token_id for token_id in eos_token_ids if token_id < vocabulary]
        self._thread: SingleThread | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def read_tokenizer(self) -> "Future[LLTokenizer]":
        """Begin to read the tokenizer. Reading takes half a second or more, during which no other Python code runs."""
        with self._lock:
            return self._submit(self._read_tokenizer)

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Begin to compile a grammar unless it is in the cache.

        Returns:
            A future of the grammar's matcher, which callers must not change. If compiling fails, the future raises
            ``GrammarError``.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or self._submit(self._compile, grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of an answer, after waiting until the grammar is compiled.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        return self.compile(grammar).result().deep_copy()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.close()

    def _submit(self, task: Callable[..., Result], *args: Any) -> "Future[Result]":
        if self._thread is None:
            self._thread = SingleThread("grammars")
        return self._thread.submit(task, *args)

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                content = without_special_texts(self._file.read_text())
                self._tokenizer = LLTokenizer(content, n_vocab=self.vocabulary, eos_token=self._eos)
            except (OSError, ValueError, LookupError) as error:
                raise GrammarError(f"answers of this model cannot follow a grammar: {error}") from error
        return self._tokenizer

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._read_tokenizer(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # The first mask takes milliseconds. Copies of the matcher share it.
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {matcher.get_error()}")
        return matcher


class Follower(Protocol):
    """The part of a sequence that masks need. ``worker.sampler.Sampled`` documents the attributes."""

    sampling: SamplingParams
    token_ids: GrowingInts
    prompt_tokens: int

    @property
    def origin(self) -> "Follower":
        """The sequence itself, without drafted tokens."""
        ...


class Masks(NamedTuple):
    """The tokens that may come next in each sequence of a step.

    Attributes:
        bits: int32 ``[rows, words]``, with a bit set for each token that may come next. A row has no bits set if its
            mask could not be computed.
        addends: numbers to add to the logits: 0 for a token that may come next, else -inf. ``[rows, vocab]`` in host
            memory, of the logits' dtype. None for logits on a device.
        end: whether only stop tokens may come next.
        forced: the tokens that must follow the next token, if the grammar leaves only one choice. Empty if the grammar
            leaves several.
    """

    bits: NDArray[np.int32]
    addends: Tensor | None
    end: tuple[bool, ...]
    forced: tuple[tuple[int, ...], ...]

    def addends_for(self, logits: Tensor) -> Tensor:
        """Return the addends on the device of ``logits`` and with the same width."""
        return device_addends(self.bits, logits) if self.addends is None else self.addends[:, : logits.shape[-1]]


@lru_cache
def _addends_of_byte(dtype: torch.dtype) -> NDArray[Any]:
    """Return the addends of the eight tokens of each byte value, ``[256, 8]``, as integers with the same bits."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    addends = torch.where(torch.from_numpy(bits) == 1, 0.0, -torch.inf).to(dtype)
    return addends.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()


def host_addends(bits: NDArray[np.int32], dtype: torch.dtype) -> Tensor:
    """Return addends ``[rows, 32 * words]``: 0 for each bit that is set, else -inf."""
    addends = np.take(_addends_of_byte(dtype), bits.view(np.uint8), axis=0).reshape(len(bits), -1)
    return torch.from_numpy(addends).view(dtype)


def device_addends(bits: NDArray[np.int32], logits: Tensor) -> Tensor:
    """Return fp32 addends on the device of ``logits``. Only the bits are copied, which are a 32nd of the size."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_set = (to_device(torch.from_numpy(bits), logits.device).unsqueeze(-1) >> shifts) & 1
    return torch.where(is_set.flatten(1)[:, : logits.shape[-1]] == 1, 0.0, -torch.inf)


class GrammarMasks:
    """Computes masks on a separate thread.

    Args:
        compiler: compiles the grammars.
        device, dtype: device and dtype of the logits.
        forces: whether to take the tokens that a grammar forces without computing their logits.

    Attributes:
        on_host: whether the logits are in host memory.
    """

    def __init__(
        self, compiler: GrammarCompiler, device: torch.device, dtype: torch.dtype, *, forces: bool = False
    ) -> None:
        self._compiler = compiler
        self._forces = forces
        self.on_host = device.type == "cpu"
        self._dtype = dtype
        self._thread: SingleThread | None = None
        self._states: WeakKeyDictionary[Follower, _State] = WeakKeyDictionary()
        self._words = -(-compiler.vocabulary // 32)

    def begin(self, sequences: Sequence[Follower]) -> "Future[Masks]":
        """Begin to compute the masks for the next token of sequences that have a grammar.

        The token ids must not change before the future is done.
        """
        if self._thread is None:
            self._thread = SingleThread("masks")
        return self._thread.submit(self._masks, sequences)

    def error(self, sequence: Follower) -> str:
        """Return why a sequence has no mask; empty if it has one."""
        state = self._states.get(sequence.origin)
        return "" if state is None else state.error

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.close()

    def _masks(self, sequences: Sequence[Follower]) -> Masks:
        bits = np.zeros((len(sequences), self._words), dtype=np.int32)
        forced: list[tuple[int, ...]] = []
        for row, sequence in zip(bits, sequences, strict=True):
            state = self._states.get(sequence.origin)
            if state is None:
                state = self._states[sequence.origin] = _State(self._compiler, sequence.sampling.grammar)
            state.fill(row, sequence)
            forced.append(state.force(row) if self._forces and _may_force(sequence.sampling) else ())
        stops = [sequence.sampling.stop_token_ids for sequence in sequences]
        end = tuple(map(_is_end, bits, stops))
        return Masks(bits, host_addends(bits, self._dtype) if self.on_host else None, end, tuple(forced))


class _State:
    """The matcher of one sequence, and the number of tokens that the matcher has read.

    Attributes:
        error: why there is no mask; empty if there is one.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: str) -> None:
        self._read = 0
        # These are the last tokens that the matcher has read, if the grammar forbids them.
        self._drafted: list[int] = []
        self.error = ""
        try:
            self._matcher = compiler.matcher(grammar)
        except GrammarError as error:
            self.error = str(error)

    def fill(self, row: NDArray[np.int32], sequence: Follower) -> None:
        """Read the sequence's new tokens, and set the bits of the tokens that may come next.

        No bits are set after an error or after a drafted token that the grammar forbids.
        """
        if self.error:
            return
        began_s = time.thread_time()
        outputs = sequence.token_ids.values[sequence.prompt_tokens :]
        self._forget_drafted(outputs)
        new = outputs[self._read :].tolist()
        drafted = len(sequence.token_ids) - len(sequence.origin.token_ids)
        if drafted and self._matcher.validate_tokens(new) < len(new):
            return
        self._read += len(new)
        for token_id in new:
            self._matcher.consume_token(token_id)
        self._drafted = outputs[len(outputs) - drafted :].tolist()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            self.error = f"the answer cannot follow its grammar any further: {self._matcher.get_error()}"
        elif not row.any():
            self.error = "the answer cannot follow its grammar any further: no text goes on from here"
        elif time.thread_time() - began_s > _MAX_MASK_S:
            self.error = "the grammar takes too long: simplify it, above all its repetitions"
        if self.error:
            row[:] = 0
        elif self._matcher.is_accepting():
            for token_id in sequence.sampling.stop_token_ids:  # Adapters and requests may have further end tokens.
                row[token_id // 32] |= _bit(token_id)

    def _forget_drafted(self, outputs: NDArray[np.int64]) -> None:
        """Roll the matcher back to before the first drafted token that was rejected."""
        first = self._read - len(self._drafted)
        pairs = zip(self._drafted, outputs[first:].tolist(), strict=False)
        came = next((at for at, (drafted, token_id) in enumerate(pairs) if drafted != token_id), None)
        came = min(len(self._drafted), len(outputs) - first) if came is None else came
        if came < len(self._drafted):
            self._matcher.rollback(len(self._drafted) - came)
            self._read = first + came
        self._drafted = self._drafted[:came]

    def force(self, row: NDArray[np.int32]) -> tuple[int, ...]:
        """If several tokens must come next, leave only the first in the row's mask, and return some of the others."""
        tokens = [] if self.error else self._matcher.compute_ff_tokens()
        if len(tokens) < 2:
            return ()
        row[:] = 0
        row[tokens[0] // 32] = _bit(tokens[0])
        return tuple(tokens[1 : 1 + _MAX_FORCED])


def _bit(token_id: int) -> np.int32:
    """Return the bit of a token within its word of the mask."""
    return np.uint32(1 << (token_id % 32)).astype(np.int32)


def _may_force(params: SamplingParams) -> bool:
    """Whether tokens may be taken without computing their logits, since nothing reports or edits the logits."""
    return params.logprobs is None and not (params.allowed_token_ids or params.bad_words)


def _is_end(row: NDArray[np.int32], stop_token_ids: Sequence[int]) -> bool:
    """Return whether only the bits of stop tokens are set."""
    stops = sum(bool(row[token_id // 32] >> (token_id % 32) & 1) for token_id in stop_token_ids)
    return 0 < stops == int.from_bytes(row.tobytes(), "little").bit_count()
