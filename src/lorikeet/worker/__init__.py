"""The worker side of a replica: executors, tensor-parallel ranks, transfers, and host LoRA."""
