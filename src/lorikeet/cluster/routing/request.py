"""A request as routing sees it."""

import msgspec

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.request import Request
from lorikeet.memory.tree import block_keys


class RoutingRequest(msgspec.Struct, frozen=True):
    """A request as routing sees it.

    Attributes:
        request_id: which.
        adapter: its version, None for the base model.
        rank: largest rank of the adapter, 0 for the base model.
        adapter_bytes: of its weights.
        known_tokens: of the prompt, and those that earlier attempts generated.
        expected_tokens: those still to be generated.
        keys: of its whole blocks (:func:`lorikeet.memory.tree.block_keys`); empty unless the router wants them.
        generated_tokens: those of the known ones that earlier attempts generated.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    rank: int
    adapter_bytes: int
    known_tokens: int
    expected_tokens: int
    keys: tuple[bytes, ...] = ()
    generated_tokens: int = 0


def routing_request(request: Request, block_size: int | None = None) -> RoutingRequest:
    """Return what routing must know of a request.

    Args:
        request: with what it has generated so far.
        block_size: tokens in a block, if the router wants keys.
    """
    adapter, known_tokens = request.adapter, len(request.prompt_token_ids) + len(request.output_token_ids)
    keys: tuple[bytes, ...] = ()
    if block_size is not None:
        keys = tuple(block_keys(request.digest, request.prompt_token_ids + request.output_token_ids, block_size))
    return RoutingRequest(
        request_id=request.request_id,
        adapter=request.digest,
        rank=0 if adapter is None else adapter.max_rank,
        adapter_bytes=0 if adapter is None else adapter.weight_bytes,
        known_tokens=known_tokens,
        expected_tokens=max(1, request.expected_tokens - len(request.output_token_ids)),
        keys=keys,
        generated_tokens=len(request.output_token_ids),
    )
