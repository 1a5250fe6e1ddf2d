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
        if not tokens:
            return None
        request, token_ids = sequence.request, sequence.token_ids
        stops, min_tokens = request.sampling.stop_token_ids, request.sampling.min_tokens
        index = made = sequence.output_tokens
        most = index + sequence.tokens_left
        finish: tuple[FinishReason, int | None] | None = None
        for token in tokens:
            token_ids.append(token.token_id)
            made += 1
            if token.token_id in stops and made > min_tokens:
                finish = FinishReason.STOP, token.token_id
                break
            if made >= most:
                finish = FinishReason.LENGTH, None
                break
        if index == len(request.output_token_ids):
            self.events.append(FirstToken(request.request_id, now))
        self._tokens.append(TokenOutput(request.request_id, request.attempt, index, tokens[: made - index]))
        return finish
