"""Moves requests and their adapters together from busy replicas to idle ones: dLoRA's reactive mechanism."""
