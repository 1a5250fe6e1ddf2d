"""Measures Lorikeet. The programs run from a checkout and are not installed.

Lorikeet is imported first, as in its commands, because OpenMP's way of waiting is fixed when torch is imported.
"""

import lorikeet  # noqa: F401
