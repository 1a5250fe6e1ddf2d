"""Names what an engine is to be best at."""

from enum import StrEnum


class Objective(StrEnum):
    """The operator's objective for requests that state no limits."""

    MIXED = "mixed"
    """Short times to the first token; a delayed answer counts a sixteenth."""
    LATENCY = "latency"
    """Short times to the end of the answer: each request counts alike, before and after its first token."""
    GOODPUT = "goodput"
    """Many requests within limits; without their own these are 2 s to the first token and 0.2 s per token."""
    THROUGHPUT = "throughput"
    """Many tokens per second, however long single requests wait."""
