"""Holds the admission policies, each in one file. ``lorikeet.policies`` lists their names."""
