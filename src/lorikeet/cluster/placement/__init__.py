"""Placement policies: which replicas serve an adapter, and with what share of its requests."""
