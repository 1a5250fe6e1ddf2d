"""What works beside the steps lets them come first."""

import os
import sys

NICE = 5
"""By how much its priority is lower: a core that both want is the steps' for three quarters of the time."""


def give_way() -> None:
    """Lower the priority of the calling thread alone, where threads have priorities of their own (Linux)."""
    if sys.platform == "linux":
        os.nice(NICE)
