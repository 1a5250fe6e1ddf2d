"""The arithmetic behind one interface. Backends: reference (torch)."""
