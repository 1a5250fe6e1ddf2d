"""Checks that a profile fits the model and the device of an engine."""

import re
from collections.abc import Sequence

import msgspec

from lorikeet.core.geometry import ModelGeometry
from lorikeet.costs.profile import CostProfile, ProfileError

_OF_A_CPU = " threads"
"""End of a processor's description in profiles of ``lorikeet profile``."""
_PRODUCT = re.compile(r"\b[A-Z]{1,3}\d{2,4}\b")
_MEMORY = re.compile(r"(\d+) ?GB\b")


def check_model(profile: CostProfile, geometry: ModelGeometry, model: str) -> None:
    """Check that a profile fits a model of these sizes. The size of an element does not matter.

    Args:
        profile: the profile to check.
        geometry: geometry of the whole served model.
        model: name of the model, for the error.

    Raises:
        ProfileError: the profile fits another model; the message names both.
    """
    if msgspec.structs.replace(geometry, dtype_bytes=profile.geometry.dtype_bytes) != profile.geometry:
        raise ProfileError(
            f"profile {profile.name} is of {profile.model}, and {model} has other sizes; use a profile of this model, "
            "or measure one with `lorikeet profile`"
        )


def check_device(profile: CostProfile, device: str, processor: str, gpus: Sequence[str]) -> None:
    """Check that a profile fits the device of the engines.

    Args:
        profile: the profile to check.
        device: ``cpu`` or ``cuda``.
        processor: name of this machine's processor.
        gpus: names of this machine's GPUs. If empty, any GPU's profile passes.

    Raises:
        ProfileError: the profile fits another device; the message names both.
    """
    running = [processor] if device == "cpu" else list(gpus)
    is_of_cpu = profile.device.endswith(_OF_A_CPU)
    if is_of_cpu != (device == "cpu"):
        is_same = False
    elif is_of_cpu:
        is_same = profile.device.startswith(processor)
    else:
        is_same = not running or any(_is_same_gpu(profile.device, gpu) for gpu in running)
    if not is_same:
        here = ", ".join(dict.fromkeys(running)) or "a GPU"
        raise ProfileError(
            f"profile {profile.name} is of {profile.device}, and engines run on {here}; use a profile of this device, "
            "or measure one with `lorikeet profile`"
        )


def _is_same_gpu(one: str, other: str) -> bool:
    """Return whether two names of GPUs mean the same product, with the same memory if both names have it."""
    if one == other:
        return True
    products, memories = ([pattern.search(name) for name in (one, other)] for pattern in (_PRODUCT, _MEMORY))
    if not all(products) or len({match[0] for match in products if match}) > 1:
        return False
    return len({match[1] for match in memories if match}) < 2
