"""Runs clients of other projects, pinned and unchanged, against one server: ``python -m benchmarks.clients``."""
