"""The figures that the papers print: one TOML file a paper in ``claims/``."""

import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path

import msgspec

PAPERS = ("elora", "chameleon", "toppings", "dlora", "loraserve")
"""In the order of their pages. Each has a file in ``claims/`` and a module of this package."""


class Form(StrEnum):
    """What a printed figure is, and so how ours is judged beside it (see ``verdicts.py``)."""

    GAIN_TIMES = "gain-times"
    """How many times better the paper's system is than a baseline, or than itself without a part: above 1."""
    GAIN_PERCENT = "gain-percent"
    """By how many percent, or points, it is better: above 0."""
    COST_PERCENT = "cost-percent"
    """By how many percent it is worse than an ideal: less is better."""
    HIGHER = "higher"
    """A value of the paper's system of which more is better."""
    LOWER = "lower"
    """A value of the paper's system of which less is better."""
    AT_MOST = "at-most"
    """A bound from above: the claim holds below it."""
    AT_LEAST = "at-least"
    """A bound from below: the claim holds above it."""
    BASELINE_TIMES = "baseline-times"
    """How many times worse a baseline or a condition is than another: above 1."""
    BASELINE_PERCENT = "baseline-percent"
    """By how many percent a baseline or a condition is worse than another: above 0."""
    VALUE = "value"
    """A property of a baseline, a workload or a device: neither more nor less is better."""


class Excluded(StrEnum):
    """Why a figure is no result, and does not count in a paper's share."""

    SETTING = "setting"
    """It was chosen or is an input."""
    ARITHMETIC = "arithmetic"
    """It follows from other printed figures alone."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One printed figure.

    Attributes:
        id: name within the paper.
        where: section or figure.
        setting: as the paper states it.
        metric: what was measured.
        baseline: what it was compared with.
        value: what the text prints, in ``unit``.
        unit: such as ``x`` or ``%``.
        form: how it is judged.
        system: which system it is a figure of, if not the paper's.
        excluded: why it does not count; ``None`` if it does.
        headline: whether abstract, introduction or conclusion print it.
        note: what to know about it.
        paper: name of the paper's module.
    """

    id: str
    where: str
    setting: str
    metric: str
    baseline: str
    value: float
    unit: str
    form: Form
    system: str = ""
    excluded: Excluded | None = None
    headline: bool = False
    note: str = ""
    paper: str = ""

    @property
    def name(self) -> str:
        """Name among all claims, such as ``elora/wom-ttft``."""
        return f"{self.paper}/{self.id}"


class PrintedPaper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A paper's name, title, authors and printed figures."""

    name: str
    title: str
    authors: str
    claim: tuple[Claim, ...]


@cache
def read_claims(paper: str) -> PrintedPaper:
    """Return what a paper prints.

    Raises:
        msgspec.ValidationError: the file does not have the fields of a claim.
    """
    text = (Path(__file__).parent / "claims" / f"{paper}.toml").read_text()
    made = msgspec.convert(tomllib.loads(text), PrintedPaper, strict=False)
    return msgspec.structs.replace(
        made, claim=tuple(msgspec.structs.replace(claim, paper=paper) for claim in made.claim)
    )
