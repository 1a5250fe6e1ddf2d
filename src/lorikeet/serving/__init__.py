"""Answers requests: service, generation, model names, loading on demand, batches. Routes are in ``api``."""
