"""LoRA of prefills computed by host workers while the adapter is being loaded to the device (TOPPINGS)."""
