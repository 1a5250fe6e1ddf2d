"""Transfers of adapters and KV between files, host memory and the device, while steps run."""
