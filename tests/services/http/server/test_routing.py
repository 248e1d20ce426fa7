from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.errors import ApiError
from areal.services.http.service import PathTable


def table() -> PathTable[str]:
    routes = PathTable[str]()
    routes.add("GET", "/models", "list")
    routes.add("POST", "/models", "make")
    routes.add("GET", "/models/{name...}", "one")
    routes.add("POST", "/drain/{worker}", "drain")
    routes.add("POST", "/models/close", "close")
    routes.add("GET", "/pairs/{pair}/set/{key}", "member")
    routes.add("GET", "/pairs/{pair}/{key}", "value")
    return routes


@pytest.mark.parametrize(
    ("method", "path", "target", "found"),
    [
        ("GET", "/models", "list", {}),
        ("HEAD", "/models", "list", {}),
        ("POST", "/models", "make", {}),
        ("GET", "/models/org/name", "one", {"name": "org/name"}),
        ("GET", "/models/org%2Fname", "one", {"name": "org/name"}),
        ("POST", "/models/close", "close", {}),
        ("GET", "/models/close", "one", {"name": "close"}),
        ("HEAD", "/models/close", "one", {"name": "close"}),
        ("POST", "/drain/a%2Fb%20c", "drain", {"worker": "a/b c"}),
        ("GET", "/pairs/p/set/k", "member", {"pair": "p", "key": "k"}),
        ("GET", "/pairs/p/k", "value", {"pair": "p", "key": "k"}),
    ],
)
def test_path_is_routed_to_target(method: str, path: str, target: str, found: dict[str, str]) -> None:
    assert table().find(method, path) == (target, found)


@pytest.mark.parametrize(
    "path", ["", "/", "/model", "/models/", "/drain/", "/drain/a/b", "//models", "/%6Dodels", "/pairs//k", "*"]
)
def test_unknown_path_is_404(path: str) -> None:
    with pytest.raises(ApiError) as caught:
        table().find("GET", path)
    assert caught.value.status == 404


@pytest.mark.parametrize("path", ["/pairs/%ff/k", "/models/%C3", "/drain/%ED%A0%80"])
def test_path_with_invalid_percent_encoding_is_400(path: str) -> None:
    """Were they replaced, two names would be one."""
    with pytest.raises(ApiError) as caught:
        table().find("POST" if "drain" in path else "GET", path)
    assert (caught.value.status, caught.value.code) == (400, "invalid_path")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/models", "GET, HEAD, POST"), ("GET", "/drain/a", "POST"), ("PUT", "/models/close", "POST")],
)
def test_unsupported_method_is_405_with_allow(method: str, path: str, allowed: str) -> None:
    with pytest.raises(ApiError) as caught:
        table().find(method, path)
    assert caught.value.status == 405 and caught.value.headers["Allow"] == allowed


def test_duplicate_route_is_refused() -> None:
    routes = table()
    for path in ("/models", "/drain/{worker}"):
        with pytest.raises(ValueError):
            routes.add("POST", path, "other")


@given(st.text(max_size=40), st.sampled_from(["GET", "POST", "PUT", "HEAD"]))
def test_any_path_is_404_or_405(path: str, method: str) -> None:
    try:
        table().find(method, path)
    except ApiError as error:
        assert error.status in (404, 405)
