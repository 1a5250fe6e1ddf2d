"""The table finds the row that answers a request."""

import pytest

from lorikeet.http.routes import Callers, Route, Routes, RouteTable

LIST = Route("GET/POST /v1/things", Callers.KEYS)
UPLOAD = Route("POST /v1/things/upload", Callers.ADMINS)
FIGURES = Route("GET /v1/things/{name:path}/figures", Callers.OPERATOR)
SHOW = Route("GET /v1/things/{name:path}", Callers.KEYS)
REMOVE = Route("DELETE /v1/things/{name:path}", Callers.ADMINS_AND_TENANTS)
HEALTH = Route("GET /health /health/ready", Callers.ANYONE)
TABLE = RouteTable([LIST, UPLOAD, FIGURES, SHOW, REMOVE, HEALTH])


@pytest.mark.parametrize(
    ("method", "path", "row"),
    [
        ("GET", "/v1/things", LIST),
        ("POST", "/v1/things", LIST),
        ("HEAD", "/v1/things", LIST),
        ("GET", "/health/ready", HEALTH),
        ("GET", "/v1/things/a/b", SHOW),
        ("GET", "/v1/things/a/b/figures", FIGURES),
        ("GET", "/v1/things/upload", SHOW),
        ("POST", "/v1/things/upload", UPLOAD),
        ("DELETE", "/v1/things/upload", REMOVE),
    ],
)
def test_row_of_a_request_belongs_to_its_handler(method: str, path: str, row: Route) -> None:
    assert TABLE.find(method, path) == row


def test_path_with_a_trailing_slash_has_the_row_of_the_redirect() -> None:
    assert TABLE.find("GET", "/health/") == HEALTH
    assert TABLE.find("GET", "/health//") == HEALTH


def test_empty_name_has_the_row_of_the_handler_that_gets_it() -> None:
    assert TABLE.find("DELETE", "/v1/things/") == REMOVE


def test_method_that_a_path_lacks_has_the_row_with_the_fewest_callers() -> None:
    assert TABLE.find("PUT", "/v1/things/upload") == UPLOAD
    assert TABLE.find("PUT", "/v1/things/a") == REMOVE
    assert TABLE.find("PUT", "/health") is None


def test_unknown_path_has_no_row() -> None:
    assert TABLE.find("GET", "/v1/thing") is None


@pytest.mark.parametrize("hidden", ["GET /health", "GET /v1/things/latest", "DELETE /v1/things/{name:path}/figures"])
def test_row_that_an_earlier_one_hides_is_an_error(hidden: str) -> None:
    with pytest.raises(ValueError, match=r"is never reached: .* comes before it"):
        RouteTable([LIST, SHOW, REMOVE, HEALTH, Route(hidden, Callers.KEYS)])


def test_rows_without_a_note_have_their_modules_note() -> None:
    routes = Routes(note="about things")

    async def handler() -> None: ...

    routes.add(LIST)(handler)
    routes.add(Route("GET /other", Callers.KEYS, note="about others"))(handler)
    assert [route.row.note for route in routes] == ["about things", "about others"]
