"""Batching modes, each in one file; ``lorikeet.policies`` has their names."""
