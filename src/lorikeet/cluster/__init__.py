"""Places adapters on replicas, routes requests to the replicas, and moves adapters and requests."""
