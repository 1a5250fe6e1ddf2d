"""Transfers of adapters and KV between files, host memory and the device, in the background of the steps."""
