"""Manages one engine's memory.

The package contains the blocks of KV and adapters on device and host, the dependency tree, eviction and prefetch.
"""
