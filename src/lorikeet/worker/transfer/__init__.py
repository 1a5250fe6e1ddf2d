"""Moves adapters and KV between disk, host memory and the device, beside the steps."""
