"""Other people's clients, pinned and unchanged, against one server: ``python -m benchmarks.clients``."""
