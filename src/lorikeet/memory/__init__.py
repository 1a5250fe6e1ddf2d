"""Who lives where: blocks, adapters and KV on the device, and what leaves when space is needed."""
