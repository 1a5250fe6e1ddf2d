"""Routing policies, each in one file; ``lorikeet.policies`` has their names."""
