"""Admits requests that generate, through a gate that counts them."""

from lorikeet.http.errors import ApiError

_RETRY_AFTER_S = 1


class AdmissionGate:
    """Counts accepted sequences and closes for a drain.

    Args:
        max_queued: most accepted sequences that are unfinished at the same time.
    """

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.active = 0
        self.draining = False

    def enter(self, sequences: int) -> "Ticket":
        """Accept a request of ``sequences`` sequences.

        Raises:
            ApiError: 503, the server drains; 429, too many sequences are unfinished; 400, no gate could take so many.
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down and takes no new requests.", headers={"Retry-After": "5"})
        if sequences > self.max_queued:
            raise ApiError(400, f"The request needs {sequences} answers; at most {self.max_queued} are allowed.")
        if self.active + sequences > self.max_queued:
            raise ApiError(
                429,
                f"{self.active} requests are unfinished, and at most {self.max_queued} are accepted; try again later.",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        return Ticket(self, sequences)


class Ticket:
    """Place of a request among the accepted requests. The place is released once."""

    def __init__(self, gate: AdmissionGate, sequences: int) -> None:
        self._gate = gate
        self._sequences = sequences
        gate.active += sequences

    def release(self) -> None:
        """Release the place; a second call does nothing."""
        self._gate.active -= self._sequences
        self._sequences = 0
