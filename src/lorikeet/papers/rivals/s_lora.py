"""Implements S-LoRA's admission: first come, first served, while the reserved tokens fit the memory."""

from collections.abc import Iterable

import numpy as np

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.scheduling.admission import Admission, AdmissionCandidate, AdmissionView
from lorikeet.scheduling.policies.fifo import Fifo


class ReservedTokens(Fifo):
    """Admits requests by arrival while the memory would suffice for answers of the largest possible length.

    The first request for which the memory would not suffice ends admission, so no running request must be preempted for
    blocks. If no request runs, the next request is always admitted.

    Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (MLSys 2024), and the request queue of
    its published code.
    """

    def admit(self, now: float) -> Admission:
        """Yield requests in the order of arrival."""
        if not self._waiting:
            return
        view = self.view
        reserved = Reservation(view, ((each.request, each.output_tokens) for each in view.running()))
        for request in tuple(self._waiting):
            if not reserved.try_add(request):
                return
            match (yield AdmissionCandidate(request)):
                case None:
                    self._waiting.remove(request)
                case WaitReason.KV_BLOCKS | WaitReason.ADAPTER_BLOCKS:
                    return
                case _:
                    reserved.remove_last()


class Reservation:
    """Computes the largest number of tokens that requests together may need at a later time.

    A request needs tokens for its input and its output so far, one more after each step, and none after its longest
    answer. So the number is largest just before a request ends. Adapters count throughout.

    Args:
        view: state of the engine.
        running: requests with their numbers of generated tokens.
    """

    def __init__(self, view: AdmissionView, running: Iterable[tuple[Request, int]]) -> None:
        self._view = view
        self._needs: list[tuple[int, int]] = []
        self._adapters: list[AdapterDigest | None] = []
        self._adapter_tokens: dict[AdapterDigest | None, int] = {}
        for request, output_tokens in running:
            self._add(request, output_tokens)

    def try_add(self, request: Request) -> bool:
        """Add a waiting request if all requests still fit, or if it is the only request."""
        self._add(request, len(request.output_token_ids))
        if len(self._needs) == 1 or self.most_tokens() <= self._view.total_tokens:
            return True
        self.remove_last()
        return False

    def remove_last(self) -> None:
        """Remove the request that was added last."""
        self._needs.pop()
        self._adapters.pop()

    def most_tokens(self) -> int:
        """Return the largest number of tokens that are needed together."""
        now, left = np.array(sorted(self._needs, key=lambda need: -need[1])).T
        kv = int((np.cumsum(now) + left * np.arange(1, len(left) + 1)).max())
        return kv + sum(self._adapter_tokens[digest] for digest in set(self._adapters))

    def _add(self, request: Request, output_tokens: int) -> None:
        prompt = len(request.prompt_token_ids)
        longest = min(request.sampling.max_tokens, self._view.max_model_len - prompt)
        self._needs.append((prompt + output_tokens, longest - output_tokens))
        self._adapters.append(request.digest)
        if request.digest not in self._adapter_tokens:
            self._adapter_tokens[request.digest] = self._view.adapter_tokens(request.adapter)
