"""Implements LoRAServe: adapters are placed on replicas by rank and demand."""
