"""An eviction policy, a routing policy, an adapter source and a preset for Lorikeet."""
