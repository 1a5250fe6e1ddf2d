"""Implements ELORA: KV and adapters in one dependency tree, evicted and prefetched by a cost model."""
