"""The figures that the papers print, and causes of deviations here: two files per paper in ``claims/``."""

import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

PAPERS = ("elora", "chameleon", "toppings", "dlora", "loraserve")
"""Papers in the order of their pages. Each has files in ``claims/`` and a module in this package."""
_FOLDER = Path(__file__).parent / "claims"


class Form(StrEnum):
    """Kind of a printed figure, which decides how ours is judged against it (see ``verdicts.py``)."""

    GAIN_TIMES = "gain-times"
    """Factor by which the paper's system is better than a baseline, or than itself without a part: above 1."""
    GAIN_PERCENT = "gain-percent"
    """Percentage, or points, by which the paper's system is better: above 0."""
    COST_PERCENT = "cost-percent"
    """Percentage by which the paper's system is worse than an ideal: less is better."""
    HIGHER = "higher"
    """A value of the paper's system; more is better."""
    LOWER = "lower"
    """A value of the paper's system; less is better."""
    AT_MOST = "at-most"
    """An upper bound: the claim holds below it."""
    AT_LEAST = "at-least"
    """A lower bound: the claim holds above it."""
    BASELINE_TIMES = "baseline-times"
    """Factor by which a baseline or a condition is worse than another: above 1."""
    BASELINE_PERCENT = "baseline-percent"
    """Percentage by which a baseline or a condition is worse than another: above 0."""
    VALUE = "value"
    """A property of a baseline, a workload or a device: neither more nor less is better."""


class Excluded(StrEnum):
    """Reason why a figure is not a result, and does not count in a paper's share."""

    SETTING = "setting"
    """The figure was chosen, or is an input."""
    ARITHMETIC = "arithmetic"
    """The figure follows from other printed figures alone."""


class Reason(StrEnum):
    """Reason why a claim is not testable. The list is closed: a claim without one of these reasons must be measured."""

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
        where: section or figure of the paper.
        setting: as the paper states it.
        metric: measured quantity.
        baseline: system that the paper compares with.
        value: printed value, in ``unit``.
        unit: such as ``x`` or ``%``.
        form: kind of the figure, which decides how it is judged.
        system: system that the figure describes, if not the paper's.
        excluded: reason why the claim does not count; ``None`` if it counts.
        not_testable: name of a ``Reason`` in lower case; empty if the claim is measured.
        headline: whether the abstract, introduction or conclusion prints the claim.
        note: remark about the claim.
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
        """Name of the claim among all papers, such as ``elora/wom-ttft``."""
        return f"{self.paper}/{self.id}"

    @property
    def reason(self) -> Reason | None:
        """Reason why the claim is not testable; ``None`` if it is testable."""
        return Reason[self.not_testable.upper()] if self.not_testable else None


class PrintedPaper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A paper's name, title, authors and printed figures."""

    name: str
    title: str
    authors: str
    claim: tuple[Claim, ...]


@cache
def read_claims(paper: str) -> PrintedPaper:
    """Return a paper and its printed figures.

    Raises:
        msgspec.ValidationError: the file does not have the fields of a claim.
    """
    text = (_FOLDER / f"{paper}.toml").read_text()
    made = msgspec.convert(tomllib.loads(text), PrintedPaper, strict=False)
    return msgspec.structs.replace(
        made, claim=tuple(msgspec.structs.replace(claim, paper=paper) for claim in made.claim)
    )


class Notes(NamedTuple):
    """Texts of a paper's page.

    Attributes:
        about: description of the model, in Markdown.
        causes: causes of deviations in Markdown, by claim id; every ``opposite`` and ``overshoots`` has one.
    """

    about: str
    causes: dict[str, str]


@cache
def read_notes(paper: str) -> Notes:
    """Return the texts of a paper's page: first about the paper, then the causes, whose headings list claims."""
    about, *parts = (_FOLDER / f"{paper}.md").read_text().split("\n## ")
    causes: dict[str, str] = {}
    for part in parts:
        claims, _, text = part.partition("\n")
        causes |= dict.fromkeys(claims.split(), text.strip())
    return Notes(about.strip(), causes)
