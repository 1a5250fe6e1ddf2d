"""What answers requests: the service, generation, model names, loading on demand, batches. No routes."""
