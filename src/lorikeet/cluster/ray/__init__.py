"""Runs replicas on Ray, which starts, watches and restarts processes and moves adapters. No other package imports ray.

Ray is optional. :mod:`.start` can be imported without Ray, and its error names the package to install. The other
modules need Ray.
"""

import os

_VARIABLES = {
    "RAY_COLOR_PREFIX": "0",  # The output of other processes is written to a log, not to a terminal.
    "RAY_ENABLE_AUTO_CONNECT": "0",  # A late call must not start Ray by accident.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # Calls whose result is unused may fail silently.
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in _VARIABLES.items():  # Ray reads these when it is imported. The user's variables take precedence.
    os.environ.setdefault(_name, _value)
