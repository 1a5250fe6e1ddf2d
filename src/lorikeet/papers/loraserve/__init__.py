"""LoRAServe: adapters placed on replicas by rank and demand."""
