"""Memory of one engine: blocks of KV and adapters on device and host, the dependency tree, eviction and prefetch."""
