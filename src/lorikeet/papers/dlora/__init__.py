"""Implements dLoRA: merged and unmerged batches, burst-tolerant placement, routing by pending time, co-migration."""
