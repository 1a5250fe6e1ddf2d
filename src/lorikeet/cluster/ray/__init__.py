"""Ray at the cluster's edge: it starts, watches and restarts processes, and carries adapters. Nobody else imports it.

Ray is an extra. :mod:`.start` may be imported without it and says what to install; the others may not.
"""

import os

_VARIABLES = {
    "RAY_COLOR_PREFIX": "0",  # lines of other processes come in a log, not on a terminal
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call that comes after the end starts no Ray
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # a call whose outcome does not matter may fail in silence
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in _VARIABLES.items():  # read when Ray is imported; a user's own setting counts
    os.environ.setdefault(_name, _value)
