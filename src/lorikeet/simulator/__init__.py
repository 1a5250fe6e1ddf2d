"""Scenarios in, engines on a virtual clock, figures out. Defines no scheduler, cache or router of its own."""
