"""Keeps tenants in the registry's database: keys with scopes and limits, counters and usage."""
