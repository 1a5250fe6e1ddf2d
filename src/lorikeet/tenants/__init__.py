"""Tenants: keys with scopes and limits, their counters, and what they used, in the registry's database."""
