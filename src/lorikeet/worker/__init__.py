"""What computes: executors, ranks, transfers between tiers, and LoRA on host cores."""
