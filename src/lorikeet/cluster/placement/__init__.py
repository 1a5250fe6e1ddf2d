"""Placement policies: which replicas serve an adapter, and what share of its requests each."""
