"""Counts requests of tenants' keys at the router: admits them by the limits of their keys, and adds up their usage."""

import time

from starlette.requests import Request

from lorikeet.http.errors import ApiError
from lorikeet.http.routes import Forwarding
from lorikeet.http.tenancy import admit
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.metrics import RouterMetrics
from lorikeet.router.proxied_request import RequestBody
from lorikeet.tenants.keys import ApiKey
from lorikeet.tenants.ledger import Ended, Grant
from lorikeet.tenants.tenants import Tenants

_ASSUMED_CONTEXT_TOKENS = 8192
"""Longest sequence of a backend that does not list it, for requests without a limit of their answer."""


class Account:
    """The account of one request: what it may use, and what it has used.

    Args:
        tenants: the keys.
        key: the sender's key.
        grant: places that its limits have granted; None for a key without limits.
        sequences: number of the request's sequences.
        adapter: name of the adapter; empty for the base model.
        base: name of the base model.
        metrics: counts the key's requests, too.
    """

    def __init__(
        self,
        tenants: Tenants,
        key: ApiKey,
        grant: Grant | None,
        sequences: int,
        adapter: str,
        base: str,
        metrics: RouterMetrics,
    ) -> None:
        self._metrics = metrics
        self._tenants = tenants
        self._key = key
        self._grant = grant
        self._sequences = sequences
        self._adapter = adapter
        self._base = base
        self._arrived_s = time.time()

    def cancel(self) -> None:
        """Return the places of a request that was not sent."""
        if self._grant is not None:
            self._tenants.ledger.release(self._grant, 0)

    def close(self, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Return the unused tokens of a request, and add it to the usage. A refused request has used nothing.

        Args:
            outcome: see ``lorikeet.router.metrics.OUTCOMES``.
            prompt_tokens: tokens of the prompts.
            completion_tokens: tokens of the answers.
        """
        if outcome == "refused":
            self.cancel()
            return
        if self._grant is not None:
            self._tenants.ledger.release(self._grant, prompt_tokens + completion_tokens)
        self._metrics.tenant_ended(
            self._key.key_id, self._sequences, prompt_tokens, completion_tokens, has_failed=outcome == "failed"
        )
        for number in range(self._sequences):
            self._tenants.ledger.ended(
                Ended(
                    tenant=self._key.key_id,
                    adapter=self._adapter,
                    unix_s=self._arrived_s,
                    prompt_tokens=0 if number else prompt_tokens,
                    cached_tokens=0,
                    completion_tokens=0 if number else completion_tokens,
                    is_aborted=outcome == "left",
                    has_failed=outcome == "failed",
                    base=self._base,
                )
            )


async def open_account(
    tenants: Tenants | None,
    http: Request,
    body: RequestBody,
    adapter: RoutedAdapter | None,
    catalog: ModelCatalog,
    metrics: RouterMetrics,
    prompt_tokens: int,
) -> Account | None:
    """Admit a request, and return its account; None if the sender has no tenant's key, or nothing is computed.

    Args:
        tenants: the keys; None for a router without tenants.
        http: the client's request.
        body: its body.
        adapter: its adapter.
        catalog: the models, for the base model's card.
        metrics: counts the requests of keys.
        prompt_tokens: tokens of all prompts.

    Raises:
        ApiError: see ``lorikeet.http.tenancy.admit``.
    """
    key: ApiKey | None = http.state.access.key
    if tenants is None or key is None or body.forwarding is Forwarding.COUNTED:
        return None
    base = next(iter(catalog.base_cards()), {})
    sequences = body.sequences
    most = body.max_tokens
    if most is None:
        context = base.get("max_model_len")
        known = context if isinstance(context, int) and not isinstance(context, bool) else _ASSUMED_CONTEXT_TOKENS
        most = max(1, known - prompt_tokens)
    tokens = prompt_tokens * body.choices + sequences * most
    try:
        grant = await admit(tenants.ledger, key, sequences, tokens, http.state.rate_report, is_batch=False)
    except ApiError as error:
        if error.status == 429:
            metrics.tenant_refused(key.key_id, sequences)
        raise
    name = "" if adapter is None else adapter.name
    return Account(tenants, key, grant, sequences, name, str(base.get("id", "")), metrics)
