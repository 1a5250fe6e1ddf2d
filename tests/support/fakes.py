"""An engine in the same process that answers by script, and a small tokenizer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lorikeet.client.client import ONLY_REPLICA, Engines, OutputListener, RequestOutput
from lorikeet.client.state import ClusterState
from lorikeet.client.supervisor import EngineError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import (
    AdapterEvent,
    Admitted,
    Decided,
    Finished,
    FinishReason,
    FirstToken,
    Mechanism,
    Queued,
    RequestTimings,
)
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId, RequestId
from lorikeet.core.messages import EngineReady, EngineStats
from lorikeet.core.plan import PromptToken, Token
from lorikeet.core.request import Request

Script = Callable[[Request], list[int]]

BLOCK_TOKENS = 16
LAYERS, HIDDEN = 2, 16
GEOMETRY = ModelGeometry(LAYERS, 2, 8, dict.fromkeys(LORA_MODULES, ModuleShape(HIDDEN, HIDDEN)), 4, hidden_size=HIDDEN)


def write_adapter(folder: Path, *, rank: int = 4, seed: int = 0, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """Write an adapter on q that fits ``GEOMETRY``, or a model of other sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = generator.standard_normal((rank, hidden), dtype=np.float32)
        tensors[f"{key}.lora_B.weight"] = generator.standard_normal((hidden, rank), dtype=np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_classifier(
    folder: Path, labels: int, *, names: dict[str, str] | None = None, problem: str | None = None, seed: int = 0
) -> Path:
    """Write an adapter with a score head, as PEFT does for sequence classification, and a config with its labels."""
    write_adapter(folder, seed=seed)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(folder / "adapter_model.safetensors")
    head = np.random.default_rng(seed).standard_normal((labels, HIDDEN), dtype=np.float32)
    save_file(weights | {"base_model.model.score.weight": head}, folder / "adapter_model.safetensors")
    if names or problem:
        (folder / "config.json").write_text(json.dumps({"id2label": names, "problem_type": problem}))
    return folder


def write_dora(folder: Path) -> Path:
    """Write an adapter with magnitudes beside A and B."""
    write_adapter(folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"use_dora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(folder / "adapter_model.safetensors")
    magnitudes = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): np.ones(HIDDEN, np.float32)
        for name in weights
        if "lora_B" in name
    }
    save_file(weights | magnitudes, folder / "adapter_model.safetensors")
    return folder


def scripted_vector(request: Request) -> list[float]:
    """As many numbers as the head has labels, or as a hidden state has; they depend on the tokens."""
    assert request.pooling is not None
    scores = request.pooling.scores and request.adapter is not None
    size = request.adapter.labels if scores and request.adapter is not None else HIDDEN
    seed = sum((at + 1) * token for at, token in enumerate(request.prompt_token_ids))
    return np.random.default_rng(seed).standard_normal(size).tolist()


class FakeEngine:
    """Has the client's interface; every request is answered with the tokens that ``script`` gives.

    Attributes:
        submitted: all requests so far.
        aborted: ids of requests that were aborted.
        known: versions that it was told of and not told to drop.
        open: while cleared, no request gets a token.
        admits: while cleared, no new request is admitted.
        refusal: requests end with this error before their first token.
        impossible: since nobody could serve them.
        dies_after: requests fail after so many tokens, as if the engine were gone for good.
        per_output: tokens of an output.
        turns: of the event loop before each token.
        vector: of a request that asks for one instead of tokens.
        decisions: made for every request when it is admitted: mechanism, seconds saved, and why.
    """

    def __init__(self, script: Script = lambda request: [], *, max_model_len: int = 256) -> None:
        self.script = script
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []
        self.open = asyncio.Event()
        self.open.set()
        self.admits = asyncio.Event()
        self.admits.set()
        self.refusal: str | None = None
        self.impossible = False
        self.dies_after: int | None = None
        self.per_output = 1
        self.turns = 1
        self.vector: Callable[[Request], list[float]] = scripted_vector
        self.decisions: tuple[tuple[Mechanism, float, str], ...] = ()
        self.known: dict[AdapterDigest, AdapterRef] = {}
        self.dropped: list[AdapterDigest] = []
        self.pinned: tuple[AdapterDigest, ...] = ()
        self.names: dict[AdapterName, AdapterDigest] = {}
        self.recomputed: list[str] = []
        self.wakes: list[bool] = []
        self.callbacks: list[Callable[[AdapterEvent], None]] = []
        self.state = ClusterState(())
        self.size_error: str | None = None
        self.added: list[ReplicaId] = []
        self.removed: list[tuple[ReplicaId, float]] = []
        self.stats: EngineStats | None = None
        self.alive = True
        self.is_asleep = False
        self.restarts = 0
        self.trouble = ""
        self.engine_info = EngineReady(
            "0", GEOMETRY, 100, BLOCK_TOKENS, 4096, max_model_len, 50, "scripted", "boot", 0.0
        )

    def submit(self, request: Request) -> "FakeHandle":
        self.submitted.append(request)
        return FakeHandle(self, request)

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        self.known |= {ref.digest: ref for ref in refs}

    def pin_adapters(self, digests: Iterable[AdapterDigest]) -> None:
        self.pinned = tuple(digests)

    def name_adapters(self, names: Mapping[AdapterName, AdapterDigest], epoch: str) -> None:
        self.names = dict(names)

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        self.known.pop(digest, None)
        self.dropped.append(digest)
        return 12345

    def set_paused(self, paused: bool) -> None:
        if paused:
            self.open.clear()
        else:
            self.open.set()

    def recompute(self, salt: str) -> None:
        self.recomputed.append(salt)

    async def sleep(self) -> None:
        self.alive = False
        self.is_asleep = True

    async def wake(self, *, pool: bool = True) -> None:
        self.wakes.append(pool)
        self.alive = pool
        self.is_asleep = not pool

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        self.callbacks.append(callback)

    @property
    def views(self) -> dict[ReplicaId, "FakeEngine"]:
        return {ONLY_REPLICA: self}

    def describe(self) -> ClusterState:
        return self.state

    async def add_replica(self) -> ReplicaId:
        if self.size_error is not None:
            raise EngineError(self.size_error)
        self.added.append(ReplicaId("replica-1"))
        return self.added[-1]

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        if self.size_error is not None:
            raise EngineError(self.size_error)
        if replica_id not in {"replica-1", *(replica.id for replica in self.state.replicas)}:
            raise KeyError(replica_id)
        self.removed.append((replica_id, drain_s))

    def as_client(self) -> Engines:
        return cast(Engines, self)


class FakeHandle:
    """One request of a :class:`FakeEngine`."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self._engine = engine
        self.request = request
        self.deaths = 0
        self._aborted = asyncio.Event()
        prompt, alternatives = request.prompt_token_ids, request.sampling.prompt_logprobs
        self.prompt_logprobs = {
            position: PromptToken(prompt[position], -float(position), 2, ((7, -0.5),) * min(1, alternatives))
            for position in range(1, len(prompt))
            if alternatives is not None
        }
        self.pooled: bytes | None = None
        self.timings = RequestTimings(request.arrival_s)
        self.timings.apply(Queued(request.request_id, time.monotonic()))

    def abort(self, *, is_complete: bool = False) -> None:
        self._engine.aborted.append(self.request.request_id)
        self._aborted.set()

    async def _is_aborted(self) -> bool:
        """Wait until the engine may go on, or the request is aborted; return whether it is."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._engine.open, self._aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        return self._aborted.is_set()

    def listen(self, listener: OutputListener) -> None:
        async def pass_on() -> None:
            try:
                async for output in self:
                    listener(output)
            except EngineError as error:
                listener(error)

        self._passing_on = asyncio.create_task(pass_on())

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        engine, request_id, sampling = self._engine, self.request.request_id, self.request.sampling
        if engine.refusal is not None:
            now, impossible = time.monotonic(), engine.impossible
            finished = Finished(request_id, now, FinishReason.ERROR, error=engine.refusal, impossible=impossible)
            yield RequestOutput((), finished)
            return
        await engine.admits.wait()
        self.timings.apply(Admitted(request_id, time.monotonic(), 0))
        for mechanism, saved_s, why in engine.decisions:
            self.timings.apply(Decided(request_id, time.monotonic(), mechanism, saved_s, why))
        sent: list[Token] = []
        stop: int | None = None
        tokens = [_token(token_id, sampling.logprobs) for token_id in engine.script(self.request)]
        if self.request.pooling is not None:
            await asyncio.sleep(0)
            self.pooled, tokens = np.array(engine.vector(self.request), "<f4").tobytes(), []
        for index, token in enumerate(tokens[: sampling.max_tokens]):
            if not engine.open.is_set() and await self._is_aborted():
                yield RequestOutput((), Finished(request_id, time.monotonic(), FinishReason.ABORT))
                return
            for _ in range(engine.turns):
                await asyncio.sleep(0)
            if index == engine.dies_after:
                raise EngineError("it died and could not be restarted")
            if index == 0:
                self.timings.apply(FirstToken(request_id, time.monotonic()))
            sent.append(token)
            if token.token_id in sampling.stop_token_ids and index >= sampling.min_tokens:
                stop = token.token_id
                break
            if len(sent) == engine.per_output:
                yield RequestOutput(tuple(sent), None)
                sent = []
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        finished = Finished(request_id, time.monotonic(), reason, stop_token_id=stop)
        self.timings.apply(finished)
        yield RequestOutput(tuple(sent), finished)


def _token(token_id: int, logprobs: int | None) -> Token:
    if logprobs is None:
        return Token(token_id)
    return Token(token_id, -0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(logprobs)))


_CORPUS = ["hello world, the lorikeet is a small parrot", "Grüße an die Welt, 日本語 and emoji 🦜🌈"] * 20


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer like GPT-2's and Llama 3's: characters may be split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are ``▁``, unknown characters fall back to bytes."""
    pieces: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -10.0) for byte in range(256)]
    words = ["▁", "▁hello", "▁world", "hello", "wor", "ld", "▁the", "▁parrot", ",", "a", "e", "o", "n"]
    pieces += [(word, -float(rank + 1)) for rank, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    replace_space: Any = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace_space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
