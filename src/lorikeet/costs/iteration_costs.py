"""Profiled times of decode iterations and of merges, by which dLoRA tunes its thresholds (section 4.2)."""

import msgspec

from lorikeet.core.interpolation import interpolate


class IterationCosts(msgspec.Struct, frozen=True):
    """How long an iteration in which every request decodes takes on one replica.

    Attributes:
        requests_s: (requests, seconds) of an iteration of the base model, without the reading of its context.
        context_token_s: per token of context of any request.
        lora_s: once, if any request has an adapter that is not merged.
        lora_row_s: per request with such an adapter.
        lora_work_s: per rank of such a request, as the kernel form counts them (``mode_times.lora_work``).
        lora_adapter_s: per distinct adapter that is not merged.
        merge_s: to merge an adapter.
        unmerge_s: to restore the base weights.
    """

    requests_s: tuple[tuple[int, float], ...]
    context_token_s: float
    lora_s: float
    lora_row_s: float
    lora_work_s: float
    lora_adapter_s: float
    merge_s: float
    unmerge_s: float

    def base_s(self, requests: int, context_tokens: int) -> float:
        """Return the time of an iteration of the base model, or on merged weights."""
        return interpolate(self.requests_s, requests) + self.context_token_s * context_tokens

    def lora_part_s(self, rows: int, work: float, adapters: int) -> float:
        """Return what adapters add to it."""
        if not rows:
            return 0.0
        rows_s = self.lora_row_s * rows + self.lora_work_s * work
        return self.lora_s + rows_s + self.lora_adapter_s * adapters
