"""Divides an answer into blocks: thoughts, texts and calls, one after the other.

OpenAI's responses and Anthropic's messages consist of such blocks, and their streams open, fill and close them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.plan import Token
from lorikeet.serving.chat_answer import AnswerStep


class BlockKind(StrEnum):
    """Kind of a block's content."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        kind: the kind of its content.
        text: its text; the JSON text of the arguments for a call.
        call_id, name: id and function of a call; empty for other kinds.
        tokens: tokens of a text; a step's tokens count for the block that the step ends in.
        is_complete: whether it has been closed.
    """

    index: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""
    tokens: list[Token] = field(default_factory=list)
    is_complete: bool = False


class BlockOpened(NamedTuple):
    """Reports that a block has begun."""

    block: Block


class BlockAdded(NamedTuple):
    """Reports more text of a block; ``tokens`` carry the log probabilities of a text."""

    block: Block
    text: str
    tokens: tuple[Token, ...]


class BlockClosed(NamedTuple):
    """Reports that a block is complete."""

    block: Block


BlockEvent = BlockOpened | BlockAdded | BlockClosed


class AnswerBlocks:
    """Collects the blocks of one answer.

    Attributes:
        blocks: the blocks so far.
        reasoning_tokens: tokens of steps that ended in thoughts.
        finish_reason, stop_reason: the last step's reasons.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._call: int | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a function."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def push(self, step: AnswerStep) -> list[BlockEvent]:
        """Add a step; return its events. The last step closes the last block; an answer has at least one block."""
        events: list[BlockEvent] = []
        part = step.part
        tokens = step.tokens
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
            self.finish_reason = step.finish_reason
            self.stop_reason = step.stop_reason
            if not self.blocks:
                self._open(BlockKind.TEXT, events)
            self._close(events)
        return events

    def _block(self, kind: BlockKind, events: list[BlockEvent]) -> Block:
        """Return the open block if it is of this kind, else a new one."""
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
