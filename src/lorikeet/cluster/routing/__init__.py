"""Holds the routing policies, each in one file. ``lorikeet.policies`` lists their names."""
