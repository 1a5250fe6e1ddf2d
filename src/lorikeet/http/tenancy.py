"""Applies the scopes and limits of tenants' keys: admits requests, and writes headers about limits."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from lorikeet.http.errors import ApiError, model_not_found
from lorikeet.tenants.keys import Access, ApiKey
from lorikeet.tenants.ledger import Admission, Grant, Ledger, LimitState, never_fits
from lorikeet.tenants.store import StoreUnavailable

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class RateReport:
    """Headers of one answer about the limits of its key.

    Attributes:
        headers: the headers by name; empty if no limit was checked.
    """

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}

    def set(self, admission: Admission) -> None:
        """Set the headers of an admission, in OpenAI's spelling."""
        headers: dict[str, str] = {}
        for of, state in (("requests", admission.requests), ("tokens", admission.tokens)):
            if state is not None:
                headers |= _headers(of, state)
        self.headers = headers


def _headers(of: str, state: LimitState) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{of}": str(state.limit),
        f"x-ratelimit-remaining-{of}": str(state.remaining),
        f"x-ratelimit-reset-{of}": duration(state.reset_s),
    }


def duration(seconds: float) -> str:
    """Return a time in the form of OpenAI's headers, such as ``6m0s``, rounded up to whole seconds."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


async def admit(
    ledger: Ledger, key: ApiKey, sequences: int, tokens: int, report: RateReport, *, is_batch: bool
) -> Grant | None:
    """Take the places of a request; return None if its key has no limits.

    Args:
        ledger: counts the places of all keys.
        key: the sender's key.
        sequences: number of the request's sequences.
        tokens: tokens of the prompts plus the token limits of the answers.
        report: receives the remaining places.
        is_batch: whether the request is a line of a batch, which does not count as concurrent.

    Raises:
        ApiError: 429, a limit is reached, with the time of a retry; 400, no retry can succeed; 503, the ledger fails.
    """
    if not key.settings.is_limited:
        return None
    if why := never_fits(key, sequences, tokens, is_concurrent=not is_batch):
        raise ApiError(400, f"The request can never be accepted for this key: {why}.")
    answer = ledger.ask(key, sequences, tokens, is_concurrent=not is_batch)
    try:
        admission = await asyncio.shield(asyncio.wrap_future(answer))
    except asyncio.CancelledError:
        answer.add_done_callback(lambda done: _give_back(ledger, done))
        raise
    except StoreUnavailable as error:
        raise ApiError(
            503, "The limits of this key cannot be checked now; try again later.", headers={"Retry-After": "5"}
        ) from error
    report.set(admission)
    if admission.grant is None:
        retry_s = max(1, math.ceil(admission.retry_after_s))
        raise ApiError(
            429, f"A limit of this key is reached: {admission.reason}.", headers={"Retry-After": str(retry_s)}
        )
    return admission.grant


def _give_back(ledger: Ledger, answer: "Future[Admission]") -> None:
    """Give back the places of a request whose client has hung up before it got them."""
    if answer.exception() is None and (grant := answer.result().grant) is not None:
        ledger.release(grant, 0)


def check_use(access: Access, names: Iterable[str], asked: str) -> None:
    """Check that a sender may use a model, which may have several names.

    Raises:
        ApiError: 404 if the sender may not see the model, with the text for an unknown model; 403 if the sender may see
            but not use the model.
    """
    known = tuple(names)
    if any(map(access.may_use, known)):
        return
    if any(map(access.may_see, known)):
        raise ApiError(403, f"This key may see the model `{asked}`, but not use it.", param="model")
    raise model_not_found(asked)
