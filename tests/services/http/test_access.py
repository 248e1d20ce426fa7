from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.resources.addresses import is_loopback
from areal.services.http.auth import Access, AdminKey, Authenticator, load_admin_key, refuse_open_bind
from areal.services.http.errors import ApiError

KEYED = Authenticator(AdminKey(b"secret"), loopback=True)
EXPOSED = Authenticator(AdminKey(b"secret"), loopback=False)
KEYLESS = Authenticator(None, loopback=True)


def refused(gate: Authenticator, headers: dict[str, str], access: Access) -> int:
    with pytest.raises(ApiError) as caught:
        gate.check(headers, access)
    return caught.value.status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sécret"},
        {"Authorization": "Bearer \udcff\udcfe"},
        {"Authorization": "Bearer two words"},
        {"x-api-key": "ключ"},
        {"x-api-key": ""},
    ],
)
@pytest.mark.parametrize("access", [Access.INFERENCE, Access.ADMIN])
def test_missing_or_malformed_key_is_401(headers: dict[str, str], access: Access) -> None:
    assert refused(KEYED, headers, access) == 401


def test_wrong_key_is_403_for_admins_and_401_for_callers() -> None:
    headers = {"Authorization": "Bearer wrong"}
    assert refused(KEYED, headers, Access.ADMIN) == 403
    assert refused(KEYED, headers, Access.INFERENCE) == 401


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer secret"}, {"Authorization": "bearer secret"}, {"x-api-key": "secret"}]
)
def test_right_key_passes_everywhere(headers: dict[str, str]) -> None:
    for access in Access:
        assert EXPOSED.check(headers, access) is (access is not Access.HEALTH)


def test_session_key_passes_to_session_handler() -> None:
    assert not KEYED.check({"Authorization": "Bearer sk-somebody"}, Access.SESSION)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}])
def test_health_is_open_and_metrics_are_loopback_only(headers: dict[str, str]) -> None:
    for gate in (KEYED, EXPOSED):
        gate.check(headers, Access.HEALTH)
    KEYED.check(headers, Access.METRICS)
    assert refused(EXPOSED, headers, Access.METRICS) in (401, 403)
    assert KEYED.sees_details(headers) and not EXPOSED.sees_details(headers)
    assert EXPOSED.sees_details({"x-api-key": "secret"})


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
def test_host_name_without_a_key_is_refused(host: str) -> None:
    assert refused(KEYLESS, {"Host": host}, Access.INFERENCE) == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "app.localhost"])
def test_loopback_host_passes_without_key(host: str) -> None:
    KEYLESS.check({"Host": host}, Access.ADMIN)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example"])
def test_cross_origin_page_without_key_is_refused(origin: str) -> None:
    assert refused(KEYLESS, {"Host": "127.0.0.1:8080", "Origin": origin}, Access.ADMIN) == 403


def test_local_page_passes_without_key() -> None:
    KEYLESS.check({"Host": "localhost", "Origin": "http://localhost:3000"}, Access.INFERENCE)


def test_host_name_with_a_key_passes() -> None:
    KEYED.check({"Host": "gpu-box.example", "Authorization": "Bearer secret"}, Access.ADMIN)


def test_key_file_is_stripped_and_never_printed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    key = load_admin_key(str(file))
    assert key is not None and key.matches(b"secret")
    assert "secret" not in repr(key)
    assert key.bearer() == {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("content", [b"", b"\n", "schlüssel".encode(), b"two words", b"two\nlines"])
def test_key_file_without_usable_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(UsageFault):
        load_admin_key(str(file))


def test_missing_key_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="nowhere"):
        load_admin_key(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-box", ""])
def test_public_bind_requires_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageFault):
        refuse_open_bind(host, None)
    with pytest.raises(UsageFault, match="15 characters"):
        refuse_open_bind(host, AdminKey(b"0123456789abcde"))
    refuse_open_bind(host, AdminKey(b"0123456789abcdef"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_bind_requires_no_key(host: str) -> None:
    refuse_open_bind(host, None)
    refuse_open_bind(host, AdminKey(b"short"))
