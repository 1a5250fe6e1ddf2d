"""Many replicas: which adapter lives where, which replica a request goes to, and when both move."""
