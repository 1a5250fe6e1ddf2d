"""Fits the images of prompts into steps."""

from collections.abc import Iterable, Iterator

from lorikeet.core.images import PromptImage
from lorikeet.core.plan import ImageStep
from lorikeet.core.request import Request
from lorikeet.memory.images import ImageMemory
from lorikeet.scheduling.state import SchedulerLimits, Sequence


class StepImages:
    """The images of one step.

    A step computes at most as many tokens of images as it computes tokens of prompts, but one image at least, so that
    prompts with many images do not stall running answers.

    Args:
        memory: the embeddings that the executor has.
        limits: limits of a plan.
    """

    def __init__(self, memory: ImageMemory, limits: SchedulerLimits) -> None:
        self._memory = memory
        self._limits = limits
        self._new: dict[bytes, int] = {}

    def fit(self, sequence: Sequence, tokens: int, *, is_first: bool) -> int:
        """Return how many of the next tokens of a sequence a step computes.

        A step ends before an image that it cannot compute any more. Tokens that see each other stay together.

        Args:
            sequence: the sequence.
            tokens: number of tokens within the step's budget.
            is_first: whether the step has no prefill yet. Tokens that stay together may then exceed the budget.
        """
        start = sequence.computed_tokens
        end = start + tokens
        for first, stop in self._together(sequence):
            if first < end < stop and stop > start:
                end = stop if first <= start and is_first else max(first, start)
        for image, key in _within(sequence, start, end):
            if self._memory.has(key) or key in self._new:
                continue
            if self._new and sum(self._new.values()) + image.length > self._limits.max_num_batched_tokens:
                end = start if self._limits.whole_prompts else max(image.offset, start)
                break
            self._new[key] = image.length
        return end - start

    def _together(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """Yield the ranges of tokens that see each other."""
        if self._limits.whole_prompts:
            yield 0, sequence.prompt_tokens
        elif self._limits.whole_images:
            for image in sequence.request.images:
                yield image.offset, image.offset + image.length

    def take(self, steps: Iterable[tuple[Sequence, int]]) -> tuple[tuple[ImageStep, ...], tuple[bytes, ...]]:
        """Return the images that a step computes, and the keys of embeddings that the executor forgets.

        Args:
            steps: the sequences of the step with the number of tokens of each.
        """
        new: dict[bytes, int] = {}
        found: list[ImageStep] = []
        used: dict[bytes, None] = {}
        reused = 0
        for sequence, tokens in steps:
            for image, key in _within(sequence, sequence.computed_tokens, sequence.computed_tokens + tokens):
                if self._memory.has(key):
                    used[key] = None
                    reused += image.offset >= sequence.computed_tokens
                elif key not in new:
                    new[key] = image.length
                    request = sequence.request
                    ref = None if key == image.digest else request.adapter
                    found.append(ImageStep(key, request.request_id, request.images.index(image), ref))
        self._memory.use(used, reused)
        return tuple(found), self._memory.add(new, used) if new else ()


def why_too_large(request: Request, limits: SchedulerLimits) -> str | None:
    """Return the reason why tokens of a request that see each other do not fit one step; None if they do."""
    if not request.images or not (limits.whole_images or limits.whole_prompts):
        return None
    most = limits.max_num_batched_tokens
    if limits.whole_prompts and len(request.prompt_token_ids) > most:
        return (
            f"a prompt with an image of {len(request.prompt_token_ids)} tokens exceeds max_num_batched_tokens, {most}"
        )
    longest = max(image.length for image in request.images)
    return f"an image of {longest} tokens exceeds max_num_batched_tokens, {most}" if longest > most else None


def _within(sequence: Sequence, start: int, end: int) -> Iterator[tuple[PromptImage, bytes]]:
    """Yield the images with tokens from ``start`` to ``end``, and their keys."""
    for image, key in zip(sequence.request.images, sequence.image_keys, strict=True):
        if image.offset < end and image.offset + image.length > start:
            yield image, key
