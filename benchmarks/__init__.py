"""Measurements of Lorikeet; run from a checkout, not installed."""
