"""Chameleon's multi-level queue: size classes, token quotas, two-phase admission, bypass."""
