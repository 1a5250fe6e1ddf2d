"""Who runs next: admission queues and the planner. Plain objects over plain data and a clock."""
