"""The values that a preset's policy options may have, for tests that run with every policy."""

from lorikeet.policies import POLICIES
from lorikeet.presets import PRESETS


def policy_values(option: str, *more: str) -> list[str]:
    """Return every policy of an option, with the parameters that presets set, and the values in ``more``."""
    used = {getattr(preset, option) for preset in PRESETS.values()}
    return list(dict.fromkeys([*POLICIES[option], *sorted(used), *more]))
