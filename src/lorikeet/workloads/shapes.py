"""Generates requests of the services in ELORA's evaluation (III-B): translations, personal agents and conversations.

The paper names the texts (OPUS-100, Taskmaster, LMSYS-33k) and prints no lengths. Values without a source are our
choice. All prompts of an adapter begin with the same text: an instruction, or a scene's tools and rules.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from lorikeet.workloads.function_trace import Invocation
from lorikeet.workloads.workload import WorkloadRequest


class LengthRange(NamedTuple):
    """Draws log-normal lengths, which lengths of texts roughly follow.

    Attributes:
        median: median length in tokens.
        spread: standard deviation of the logarithm.
        most: largest length. Longer draws are cut to this length.
    """

    median: float
    spread: float
    most: int

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Return ``count`` lengths of at least one token."""
        drawn = generator.lognormal(np.log(self.median), self.spread, count)
        return np.clip(np.rint(drawn), 1, self.most).astype(int).tolist()


class Translation(msgspec.Struct, frozen=True):
    """Makes requests that translate one sentence each. An adapter is a pair of languages (ELORA, section III-B).

    Attributes:
        instruction_blocks: number of leading blocks that all requests of a pair share.
        sentence: length of the sentence.
        growth: spread of the ratio of the translation's length to the sentence's, around 1.
    """

    instruction_blocks: int = 1
    sentence: LengthRange = LengthRange(24, 0.7, 256)
    growth: float = 0.25

    def requests(
        self, calls: Sequence[Invocation], names: Sequence[str | None], block_size: int, generator: np.random.Generator
    ) -> list[WorkloadRequest]:
        """Return one request for each call.

        Args:
            calls: time and adapter of each call.
            names: names of the adapters.
            block_size: length of a prefix block.
            generator: source of the lengths.
        """
        sentences = self.sentence.draw(len(calls), generator)
        ratios = generator.lognormal(0.0, self.growth, len(calls))
        before = self.instruction_blocks * block_size
        return [
            WorkloadRequest(
                call.at_s,
                names[call.adapter],
                before + tokens,
                max(1, round(tokens * ratio)),
                _own_blocks(call.adapter, self.instruction_blocks),
                prefix_block_tokens=block_size,
            )
            for call, tokens, ratio in zip(calls, sentences, ratios.tolist(), strict=True)
        ]


class Dialogues(msgspec.Struct, frozen=True):
    """Makes a dialogue for each call.

    An agent's dialogue is about a task, and an adapter is a scene, such as ordering a pizza.

    Every turn sends the whole dialogue so far. Its blocks cut one growing text, so a turn shares every block that was
    full before, and the partial block as far as it was filled.

    Attributes:
        scene_blocks: number of leading blocks that all dialogues of a scene share.
        turns: mean number of requests of a dialogue. Taskmaster-1 has 23 utterances on average, of two speakers (Byrne
            and others, EMNLP 2019).
        least_turns: smallest number of turns in a dialogue. The number of further turns has a Poisson distribution.
        utterance: length of the user's messages.
        answer: length of each answer; None for the length of utterances.
        pause_s: mean time from one request to the next, exponential.
    """

    scene_blocks: int = 4
    turns: float = 11.5
    least_turns: int = 1
    utterance: LengthRange = LengthRange(16, 0.7, 128)
    answer: LengthRange | None = None
    pause_s: float = 15.0

    def requests(
        self, calls: Sequence[Invocation], names: Sequence[str | None], block_size: int, generator: np.random.Generator
    ) -> list[WorkloadRequest]:
        """Return the requests of all dialogues in the order of arrival.

        Args:
            calls: start time and adapter of each dialogue.
            names: names of the adapters.
            block_size: length of a prefix block.
            generator: source of lengths and pauses.
        """
        ids = itertools.count(len(names) * self.scene_blocks)
        found: list[WorkloadRequest] = []
        for number, call in enumerate(calls):
            found += self._dialogue(number, call, names[call.adapter], block_size, ids, generator)
        return sorted(found, key=lambda turn: turn.arrival_s)

    def _dialogue(
        self,
        number: int,
        call: Invocation,
        name: str | None,
        block_size: int,
        ids: Iterator[int],
        generator: np.random.Generator,
    ) -> list[WorkloadRequest]:
        turns = self.least_turns + int(generator.poisson(self.turns - self.least_turns))
        utterances = self.utterance.draw(turns, generator)
        answers = (self.answer or self.utterance).draw(turns, generator)
        pauses_s = generator.exponential(self.pause_s, turns).tolist()
        at_s = call.at_s
        tokens = self.scene_blocks * block_size
        blocks = _own_blocks(call.adapter, self.scene_blocks)
        found = []
        for utterance, answer, pause_s in zip(utterances, answers, pauses_s, strict=True):
            tokens += utterance
            missing = -(-tokens // block_size) - len(blocks)
            blocks += tuple(itertools.islice(ids, missing))
            conversation = f"dialogue-{number:05d}"
            found.append(
                WorkloadRequest(at_s, name, tokens, answer, blocks, conversation, prefix_block_tokens=block_size)
            )
            tokens += answer
            at_s += pause_s
        return found


def _own_blocks(adapter: int, blocks: int) -> tuple[int, ...]:
    """Return the ids of the leading blocks that all requests of an adapter share."""
    return tuple(range(adapter * blocks, (adapter + 1) * blocks))


SHAPES: dict[str, Translation | Dialogues] = {
    "translation": Translation(),
    "agent": Dialogues(),
    "chatbot": Dialogues(
        scene_blocks=0,
        turns=3.0,
        utterance=LengthRange(50, 0.9, 1024),
        answer=LengthRange(150, 0.8, 1024),
        pause_s=45.0,
    ),
    "conversations": Dialogues(
        scene_blocks=1,
        turns=5.0,
        least_turns=3,
        utterance=LengthRange(48, 0.8, 256),
        answer=LengthRange(24, 0.7, 128),
        pause_s=20.0,
    ),
}
