"""Requests and adapters that move together from busy replicas to idle ones: dLoRA's reactive mechanism."""
