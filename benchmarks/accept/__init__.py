"""Acceptance: one runner for each "Done when" line, its result in ``docs/status/<line>.json``."""
