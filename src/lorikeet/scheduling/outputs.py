"""What an engine has to tell: tokens and events since it was last asked."""

from lorikeet.core.events import FinishReason, FirstToken, RequestEvent
from lorikeet.core.messages import TokenOutput
from lorikeet.core.plan import Token
from lorikeet.scheduling.sequence import Sequence


class Outputs:
    """Collects them.

    Attributes:
        events: in the order in which they happened.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenOutput] = []
        self.events: list[RequestEvent] = []

    def take(self) -> tuple[tuple[TokenOutput, ...], tuple[RequestEvent, ...]]:
        """Return tokens and events since the last call."""
        taken = tuple(self._tokens), tuple(self.events)
        self._tokens, self.events = [], []
        return taken

    def accept(
        self, sequence: Sequence, tokens: tuple[Token, ...], now: float
    ) -> tuple[FinishReason, int | None] | None:
        """Append sampled tokens until one ends the request; return how it ended, and by which token, if it did.

        Args:
            sequence: which gets them.
            tokens: in their order.
            now: the time.
        """
        request, token_ids = sequence.request, sequence.token_ids
        request_id, attempt, stops = request.request_id, request.attempt, request.sampling.stop_token_ids
        made, left = sequence.output_tokens, sequence.tokens_left
        if tokens and made == len(request.output_token_ids):
            self.events.append(FirstToken(request_id, now))
        for token in tokens:
            self._tokens.append(TokenOutput(request_id, attempt, made, token))
            token_ids.append(token.token_id)
            made, left = made + 1, left - 1
            if token.token_id in stops and made > request.sampling.min_tokens:
                return FinishReason.STOP, token.token_id
            if left <= 0:
                return FinishReason.LENGTH, None
        return None
