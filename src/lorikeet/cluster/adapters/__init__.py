"""Tracks the adapters that each replica holds, and copies them between replicas."""
