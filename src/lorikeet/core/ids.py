"""Distinct types for ids, so that a type checker finds mixed-up ids."""

from typing import NewType
from zlib import crc32

RequestId = NewType("RequestId", str)
"""Chosen by the submitter; unique while the request lives."""

AdapterName = NewType("AdapterName", str)
"""The name in a client's ``model`` field. It points to a version and may be moved to another."""

AdapterDigest = NewType("AdapterDigest", str)
"""One version of an adapter: hex SHA-256 over its weights and config."""

BlockId = NewType("BlockId", int)
"""Index of a block in an arena; the same on every tensor-parallel rank."""

ReplicaId = NewType("ReplicaId", str)
"""One engine of a cluster, with all its tensor-parallel ranks."""


def number_of(digest: AdapterDigest) -> int:
    """Return the number of a version in interfaces that want one, such as Dynamo's and events of KV."""
    return crc32(digest.encode())
