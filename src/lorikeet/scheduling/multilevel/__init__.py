"""Chameleon's multi-level queue: size classes, quotas of tokens, two-phase admission, bypass."""
