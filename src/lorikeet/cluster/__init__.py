"""Many replicas: places adapters on them, routes requests to them, and moves both."""
