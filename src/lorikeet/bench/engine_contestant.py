"""Lorikeet's engine as one side of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from lorikeet.adapters.store import reference
from lorikeet.bench.contestants import Outcome, Work
from lorikeet.config import Settings
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica


class LorikeetContestant:
    """The engine in this process, as the server runs it."""

    name = "lorikeet"

    def __init__(self, settings: Settings, folders: Sequence[Path]) -> None:
        self._engine, sizes, _ = build_replica(settings)
        self._refs = [reference(folder.name, folder, sizes.geometry) for folder in folders]
        self._clock = MonotonicClock()
        self._submitted = 0

    def run(self, work: Work) -> Outcome:
        """Run one batch, greedily."""
        start_s = self._clock.now()
        tokens: dict[RequestId, list[int]] = {}
        sampling = SamplingParams(max_tokens=work.output_tokens, temperature=0.0)
        for prompt, adapter in zip(work.prompts, work.adapters, strict=True):
            request_id = RequestId(f"offline-{self._submitted}")
            self._submitted += 1
            tokens[request_id] = []
            self._engine.submit(Request(request_id, prompt, sampling, start_s, self._refs[adapter]))
        while self._engine.has_requests:
            for output in self._engine.step().tokens:
                tokens[output.request_id].append(output.token.token_id)
            if not self._engine.is_busy:
                self._engine.wait_for_load()
        return Outcome(self._clock.now() - start_s, list(tokens.values()))

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()
