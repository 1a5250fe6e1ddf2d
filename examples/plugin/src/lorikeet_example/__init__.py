"""An eviction policy, a routing policy, an adapter source, an exporter and a preset for Lorikeet."""
