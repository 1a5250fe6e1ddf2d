"""Makes workloads: arrivals, adapters, lengths, conversations, traces, and the format that all commands read."""
