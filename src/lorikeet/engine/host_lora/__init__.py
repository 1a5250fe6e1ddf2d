"""What adapters add to prefills while they are still on their way to the device, computed on host cores (TOPPINGS)."""
