"""Who may call a route, for every kind of callers and every kind of key."""

from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from lorikeet.http.auth import Auth
from lorikeet.http.routes import Callers, Route, RouteTable

KEYS = ("", "unknown", "api", "admin", "tenant")
TABLE = RouteTable(Route(f"POST /{callers.name.lower()}", callers) for callers in Callers)


class _Key:
    key_id = "key"


class _Tenants:
    """The keys of tenants, of which ``tenant`` is one."""

    def find(self, secret: str) -> _Key | None:
        return _Key() if secret == "tenant" else None

    def may_look_again(self) -> bool:
        return False


async def statuses(path: str, *, method: str = "POST", has_tenants: bool, **keys: Any) -> list[int]:
    """Return the status for each of ``KEYS``."""
    tenants: Any = _Tenants() if has_tenants else None
    auth = Auth(PlainTextResponse("ok"), TABLE, keys.get("api_keys", ()), keys.get("admin_keys", ()), "", tenants)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(auth), base_url="http://server") as http:
        return [
            (await http.request(method, path, headers={"authorization": f"Bearer {key}"})).status_code for key in KEYS
        ]


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        (Callers.ANYONE, [200, 200, 200, 200, 200]),
        (Callers.ANYONE_WITHOUT_TENANTS, [200, 200, 200, 200, 200]),
        (Callers.KEYS, [401, 401, 200, 200, 401]),
        (Callers.OPERATOR, [401, 401, 200, 200, 401]),
        (Callers.ADMINS_AND_TENANTS, [401, 401, 403, 200, 401]),
        (Callers.ADMINS, [401, 401, 403, 200, 401]),
    ],
)
async def test_callers_of_a_server_with_keys(callers: Callers, expected: list[int]) -> None:
    path = f"/{callers.name.lower()}"
    assert await statuses(path, has_tenants=False, api_keys=["api"], admin_keys=["admin"]) == expected


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        (Callers.ANYONE, [200, 200, 200, 200, 200]),
        (Callers.ANYONE_WITHOUT_TENANTS, [401, 401, 200, 200, 403]),
        (Callers.KEYS, [401, 401, 200, 200, 200]),
        (Callers.OPERATOR, [401, 401, 200, 200, 403]),
        (Callers.ADMINS_AND_TENANTS, [401, 401, 403, 200, 200]),
        (Callers.ADMINS, [401, 401, 403, 200, 403]),
    ],
)
async def test_callers_of_a_server_with_tenants(callers: Callers, expected: list[int]) -> None:
    path = f"/{callers.name.lower()}"
    assert await statuses(path, has_tenants=True, api_keys=["api"], admin_keys=["admin"]) == expected


@pytest.mark.parametrize("callers", list(Callers))
async def test_server_without_keys_and_tenants_is_open(callers: Callers) -> None:
    assert await statuses(f"/{callers.name.lower()}", has_tenants=False) == [200] * len(KEYS)


async def test_api_keys_are_for_everything_without_admin_keys() -> None:
    assert await statuses("/admins", has_tenants=False, api_keys=["api"]) == [401, 401, 200, 401, 401]


@pytest.mark.parametrize(("callers", "status"), [(Callers.KEYS, 200), (Callers.ADMINS, 401)])
async def test_admin_keys_alone_close_only_the_routes_of_admins(callers: Callers, status: int) -> None:
    found = await statuses(f"/{callers.name.lower()}", has_tenants=False, admin_keys=["admin"])
    assert found == [status, status, status, 200, status]


async def test_path_without_a_row_needs_an_operators_key() -> None:
    keys = {"api_keys": ["api"], "admin_keys": ["admin"]}
    assert await statuses("/unknown", has_tenants=True, **keys) == [401, 401, 200, 200, 403]


async def test_preflight_needs_no_key_and_opens_nothing_to_tenants() -> None:
    keys = {"api_keys": ["api"], "admin_keys": ["admin"]}
    assert await statuses("/admins", method="OPTIONS", has_tenants=True, **keys) == [200, 200, 200, 200, 403]
