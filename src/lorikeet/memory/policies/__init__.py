"""Holds the eviction and prefetch policies, each in one file. ``lorikeet.policies`` lists their names."""
