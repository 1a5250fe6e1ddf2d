"""How long classes with waiting requests go without an admission."""

from collections.abc import Collection


class Gaps:
    """One under way for each class that has waiting requests."""

    def __init__(self) -> None:
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

    def longest_s(self, now: float) -> dict[int, float]:
        """Return the longest of each class, those that go on included."""
        for number, since_s in self._since_s.items():
            self._note(number, now - since_s)
        return dict(self._longest_s)

    def _note(self, number: int, gap_s: float) -> None:
        self._longest_s[number] = max(self._longest_s.get(number, 0.0), gap_s)
