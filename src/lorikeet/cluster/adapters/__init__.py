"""Which adapters each replica holds, and how copies reach it."""
