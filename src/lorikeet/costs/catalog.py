"""Profiles by name: composed ones, or a file."""

from pathlib import Path

from lorikeet.costs.devices import DEVICES, MODELS, Device, Model
from lorikeet.costs.hardware import compose_profile, pool_bytes, profile_name
from lorikeet.costs.profile import CostProfile, ProfileError, read_profile
from lorikeet.costs.published_lora import LoraPaper


def _composed() -> dict[str, tuple[Device, Model, int]]:
    """Return every (device, model, degree) whose weights fit, by name."""
    return {
        profile_name(device, model, degree): (device, model, degree)
        for device in DEVICES.values()
        for model in MODELS.values()
        for degree in device.degrees
        if pool_bytes(device, model, degree) > 0
    }


def profile_names() -> list[str]:
    """Return the names of all composed profiles."""
    return list(_composed())


def load_profile(name_or_path: str | Path) -> CostProfile:
    """Return a profile.

    Args:
        name_or_path: a name of :func:`profile_names`, if you like with ``@`` and the paper whose LoRA constants it
            shall use (``a100-80-llama-2-7b@loraserve``), or a path that ends in ``.toml``.

    Raises:
        ProfileError: there is none of this name, or the file cannot be read.
    """
    text = str(name_or_path)
    if text.endswith(".toml"):
        return read_profile(Path(text))
    name, has_paper, paper = text.partition("@")
    composed = _composed()
    if name not in composed:
        raise ProfileError(f"no profile is called {name!r}; there are {', '.join(composed)}, and .toml files")
    if has_paper and paper not in list(LoraPaper):
        raise ProfileError(f"{text}: no LoRA constants of {paper!r}; there are those of {', '.join(LoraPaper)}")
    return compose_profile(*composed[name], LoraPaper(paper) if has_paper else None)
