"""Holds the batching modes, each in one file. ``lorikeet.policies`` lists their names."""
