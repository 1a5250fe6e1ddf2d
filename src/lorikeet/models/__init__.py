"""Decoder architectures, weight loading, tensor parallelism."""
