"""Tenants: keys with scopes and limits, their counters and usage, in the registry's database."""
