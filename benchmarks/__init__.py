"""Measurements of Lorikeet; run from a checkout, not installed.

Lorikeet comes before everything else, as in its own programs: how OpenMP waits is settled when torch is imported.
"""

import lorikeet  # noqa: F401
