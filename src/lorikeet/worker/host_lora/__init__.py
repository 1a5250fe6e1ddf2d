"""Host workers that compute the LoRA part of prefills while the adapter is being loaded to the device (TOPPINGS)."""
