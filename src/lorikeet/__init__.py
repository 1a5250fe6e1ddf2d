"""Lorikeet: a server for many LoRA adapters over one base model."""

from importlib.metadata import version

__version__ = version("lorikeet")
