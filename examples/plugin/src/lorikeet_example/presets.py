"""A preset that uses the policies of this package."""

from msgspec.structs import replace

from lorikeet.presets import PRESETS as ALL
from lorikeet.presets import PresetGroup

PRESETS = PresetGroup(
    "lorikeet-example",
    {"example": replace(ALL["lorikeet:auto"], eviction="largest(recent_s=5)", routing="by-name")},
    {"example": "the default, but the largest adapters are evicted first, and each has one replica"},
)
