"""Schedules one engine: admission queues, batching modes, and the scheduler that plans each step."""
