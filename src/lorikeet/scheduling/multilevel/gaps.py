"""How long classes with waiting requests go without an admission, and how long their requests run: figures only."""

from collections.abc import Collection


class Gaps:
    """One under way for each class that has waiting requests.

    Attributes:
        longest_run_s: by class number, the longest time from admission to the end.
    """

    def __init__(self) -> None:
        self.longest_run_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}

    def begin(self, number: int, now: float) -> None:
        """A class has waiting requests, perhaps as before."""
        self._since_s.setdefault(number, now)

    def end(self, number: int, now: float) -> None:
        """A class has had an admission, or has nobody waiting any more."""
        self._note(number, now - self._since_s.pop(number))

    def go_on(self, numbers: Collection[int], now: float) -> None:
        """Classes are others from now on: those of these numbers have waiting requests."""
        for number in self._since_s.keys() - numbers:
            self.end(number, now)
        for number in numbers:
            self.begin(number, now)

    def ran(self, number: int, ran_s: float) -> None:
        """A request of a class has ended after so long a time."""
        self.longest_run_s[number] = max(self.longest_run_s.get(number, 0.0), ran_s)

    def longest_s(self, now: float) -> dict[int, float]:
        """Return the longest of each class, those that go on included."""
        for number, since_s in self._since_s.items():
            self._note(number, now - since_s)
        return dict(self._longest_s)

    def _note(self, number: int, gap_s: float) -> None:
        self._longest_s[number] = max(self._longest_s.get(number, 0.0), gap_s)
