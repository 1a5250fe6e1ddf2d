"""LoRA of prefills computed on host cores while the adapter is still on its way to the device (TOPPINGS)."""
