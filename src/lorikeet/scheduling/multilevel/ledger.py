"""Who holds how many tokens of which class's quota."""

from collections.abc import Mapping, Sequence

from lorikeet.core.ids import RequestId


class Ledger:
    """Quotas and what is held of them: for every class, available = quota - held, which may be negative.

    So available and held tokens of all classes always add up to the total.

    Args:
        total_tokens: of all quotas; one class has them all at first.
    """

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.quotas: tuple[int, ...] = (total_tokens,)
        self.held = [0]
        self._holdings: dict[RequestId, dict[int, int]] = {}

    def available(self, number: int) -> int:
        """Return what a class may still lend."""
        return self.quotas[number] - self.held[number]

    def hold(self, request_id: RequestId, number: int, tokens: int) -> None:
        """Let a request hold so many tokens more of a class's quota."""
        parts = self._holdings.setdefault(request_id, {})
        parts[number] = parts.get(number, 0) + tokens
        self.held[number] += tokens

    def give_back(self, request_id: RequestId) -> None:
        """Return all that a request holds to the classes that it came from."""
        for number, tokens in self._holdings.pop(request_id).items():
            self.held[number] -= tokens

    def held_by(self, request_id: RequestId) -> int:
        """Return the tokens that a request holds."""
        return sum(self._holdings[request_id].values())

    def divide(self, quotas: Sequence[int], classes: Mapping[RequestId, int]) -> None:
        """Begin with new classes: what a request holds is from now on of the class that it is in by now.

        Raises:
            ValueError: the quotas do not add up to the total.
        """
        if sum(quotas) != self.total_tokens:
            raise ValueError(f"quotas {quotas} do not add up to {self.total_tokens}")
        self.quotas = tuple(quotas)
        self.held = [0] * len(quotas)
        for request_id, parts in self._holdings.items():
            tokens = sum(parts.values())
            self._holdings[request_id] = {classes[request_id]: tokens}
            self.held[classes[request_id]] += tokens
