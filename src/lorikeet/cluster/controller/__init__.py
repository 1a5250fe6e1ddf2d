"""Controls a cluster from the API process: dispatches requests, supervises replicas, and moves requests."""
