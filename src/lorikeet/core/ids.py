"""Distinct types for ids, so that a type checker sees them mixed up."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Chosen by whoever submits the request; unique while the request lives."""

AdapterName = NewType("AdapterName", str)
"""What a client writes in ``model``. A name points to a version and may move to another."""

AdapterDigest = NewType("AdapterDigest", str)
"""One version of an adapter: hex SHA-256 over its weights and config (design, idea 6)."""

BlockId = NewType("BlockId", int)
"""Index of a block in an arena; the same on every tensor-parallel rank."""

ReplicaId = NewType("ReplicaId", str)
"""One engine with all its tensor-parallel ranks, in a cluster."""
