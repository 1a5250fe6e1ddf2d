"""Extracts the properties of a request that routing needs."""

import msgspec

from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.image_keys import hashed_token_ids
from lorikeet.core.request import Request
from lorikeet.memory.tree import block_keys


class RoutingRequest(msgspec.Struct, frozen=True):
    """Holds the properties of a request that routing needs.

    Attributes:
        request_id: id of the request.
        adapter: version of its adapter; None for the base model.
        rank: largest rank of the adapter; 0 for the base model.
        adapter_bytes: size of its weights.
        known_tokens: number of tokens of the prompt and of earlier attempts.
        expected_tokens: expected number of tokens that are not yet generated.
        keys: keys of the request's whole blocks (:func:`lorikeet.memory.tree.block_keys`); empty unless the policy uses
            keys.
        generated_tokens: number of the known tokens that earlier attempts generated.
        session: name of a conversation or trajectory whose requests go to the same replica; empty for none.
        cached_tokens: number of the leading tokens whose KV a replica has, by its own reports; without replicas that
            do not report.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    rank: int
    adapter_bytes: int
    known_tokens: int
    expected_tokens: int
    keys: tuple[bytes, ...] = ()
    generated_tokens: int = 0
    session: str = ""
    cached_tokens: dict[ReplicaId, int] = {}


def routing_request(request: Request, block_size: int | None = None) -> RoutingRequest:
    """Return the properties of a request that routing needs.

    Args:
        request: the request, with the tokens that it has generated so far.
        block_size: tokens in a block, if the policy uses block keys; otherwise None.
    """
    adapter = request.adapter
    known_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    keys: tuple[bytes, ...] = ()
    if block_size is not None:
        token_ids = hashed_token_ids(request.prompt_token_ids + request.output_token_ids, request.images)
        start = request.adapter_start
        keys = tuple(block_keys(request.digest, token_ids, block_size, salt=request.kv_salt, start=start))
    return RoutingRequest(
        request_id=request.request_id,
        adapter=request.digest,
        rank=0 if adapter is None else adapter.max_rank,
        adapter_bytes=0 if adapter is None else adapter.weight_bytes,
        known_tokens=known_tokens,
        expected_tokens=max(1, request.expected_tokens - len(request.output_token_ids)),
        keys=keys,
        generated_tokens=len(request.output_token_ids),
        session=request.session,
    )
