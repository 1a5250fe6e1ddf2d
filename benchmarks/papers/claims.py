"""The figures that the papers print, and why some came out otherwise here: two files a paper in ``claims/``."""

import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

PAPERS = ("elora", "chameleon", "toppings", "dlora", "loraserve")
"""In the order of their pages. Each has files in ``claims/`` and a module of this package."""
_FOLDER = Path(__file__).parent / "claims"


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


class Reason(StrEnum):
    """Why a claim is not testable. The list is closed: a claim that fits none has to be measured."""

    HARDWARE = "needs hardware that is not modelled, such as NPUs"
    COUNTER = "a reading of a hardware utilisation counter: a model has none"
    MICROBENCHMARK = "a microbenchmark of the authors' code on their machine"
    DATA = "a statistic of a trace or data set that is not public or not here"
    INPUT = "a setting or an input of the runs, not a result"
    OTHER_SYSTEM = "a figure of another system's implementation, which is not here"
    AUTHORS_CODE = "a property of the authors' source code or data structures"
    UNDEFINED = "the paper says neither how it was measured nor in which setting"


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
        not_testable: name of a ``Reason`` in lower case; empty for what is measured.
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
    not_testable: str = ""
    headline: bool = False
    note: str = ""
    paper: str = ""

    @property
    def name(self) -> str:
        """Name among all claims, such as ``elora/wom-ttft``."""
        return f"{self.paper}/{self.id}"

    @property
    def reason(self) -> Reason | None:
        """Why it is not testable; ``None`` if it is."""
        return Reason[self.not_testable.upper()] if self.not_testable else None


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
    text = (_FOLDER / f"{paper}.toml").read_text()
    made = msgspec.convert(tomllib.loads(text), PrintedPaper, strict=False)
    return msgspec.structs.replace(
        made, claim=tuple(msgspec.structs.replace(claim, paper=paper) for claim in made.claim)
    )


class Notes(NamedTuple):
    """What a paper's page says of it.

    Attributes:
        about: what was modelled and how, in Markdown.
        causes: why claims came out otherwise, in Markdown, by id; every ``opposite`` and ``overshoots`` has one.
    """

    about: str
    causes: dict[str, str]


@cache
def read_notes(paper: str) -> Notes:
    """Return the texts of a paper's page: first what it says of the paper, then causes, whose headings list claims."""
    about, *parts = (_FOLDER / f"{paper}.md").read_text().split("\n## ")
    causes: dict[str, str] = {}
    for part in parts:
        claims, _, text = part.partition("\n")
        causes |= dict.fromkeys(claims.split(), text.strip())
    return Notes(about.strip(), causes)
