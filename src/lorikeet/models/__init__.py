"""Model configuration, the decoder, weight loading and tensor parallelism."""
