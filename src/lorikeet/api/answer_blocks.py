"""Divides an answer into blocks: thoughts, texts and calls, one after the other.

OpenAI's responses and Anthropic's messages consist of such blocks, and their streams open, fill and close them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.plan import Token
from lorikeet.serving.chat_answer import AnswerStep


class BlockKind(StrEnum):
    """What a block holds."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        kind: what it holds.
        text: of a call the JSON text of its arguments.
        call_id, name: of a call.
        tokens: of a text; those of a step count for the block that the step ends in.
        is_complete: it has been closed.
    """

    index: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""
    tokens: list[Token] = field(default_factory=list)
    is_complete: bool = False


class BlockOpened(NamedTuple):
    """A block has begun."""

    block: Block


class BlockAdded(NamedTuple):
    """A block has got more text. The tokens are those of a text's log probabilities."""

    block: Block
    text: str
    tokens: tuple[Token, ...]


class BlockClosed(NamedTuple):
    """A block is complete."""

    block: Block


BlockEvent = BlockOpened | BlockAdded | BlockClosed


class AnswerBlocks:
    """The blocks of one answer.

    Attributes:
        blocks: so far.
        reasoning_tokens: tokens of steps that ended in thoughts.
        finish_reason, stop_reason: of the last step.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._call: int | None = None

    @property
    def has_calls(self) -> bool:
        """Whether a function is called."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def push(self, step: AnswerStep) -> list[BlockEvent]:
        """Add a step; return what it did. The last step closes the last block, and an answer has one at least."""
        events: list[BlockEvent] = []
        part, tokens = step.part, step.tokens
        if part.reasoning:
            block = self._block(BlockKind.THOUGHTS, events)
            events.append(_add(block, part.reasoning))
        if part.content:
            block = self._block(BlockKind.TEXT, events)
            events.append(_add(block, part.content, () if part.calls else tokens))
        for call in part.calls:
            if call.call_id is not None or call.index != self._call:
                self._close(events)
                block = self._open(BlockKind.CALL, events, call.call_id or "", call.name or "")
                self._call = call.index
            if call.arguments:
                events.append(_add(self.blocks[-1], call.arguments))
        if self.blocks and self.blocks[-1].kind is BlockKind.THOUGHTS:
            self.reasoning_tokens += len(tokens)
        if step.finish_reason is not None:
            self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason
            if not self.blocks:
                self._open(BlockKind.TEXT, events)
            self._close(events)
        return events

    def _block(self, kind: BlockKind, events: list[BlockEvent]) -> Block:
        """Return the open block of that kind; a new one if another is open."""
        if self.blocks and self.blocks[-1].kind is kind:
            return self.blocks[-1]
        self._close(events)
        return self._open(kind, events)

    def _open(self, kind: BlockKind, events: list[BlockEvent], call_id: str = "", name: str = "") -> Block:
        block = Block(len(self.blocks), kind, call_id=call_id, name=name)
        self.blocks.append(block)
        events.append(BlockOpened(block))
        return block

    def _close(self, events: list[BlockEvent]) -> None:
        if self.blocks and not self.blocks[-1].is_complete:
            self.blocks[-1].is_complete = True
            events.append(BlockClosed(self.blocks[-1]))


def _add(block: Block, text: str, tokens: tuple[Token, ...] = ()) -> BlockAdded:
    block.text += text
    block.tokens.extend(tokens)
    return BlockAdded(block, text, tokens)
