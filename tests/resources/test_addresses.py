"""One strict reading of an external API's URL, and what its addresses may be."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import string
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal.resources.addresses import (
    ExternalUrl,
    UrlError,
    base_url,
    check_server_url,
    key_fault,
    parse_external_url,
    refusal,
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://api.example.com", ExternalUrl("https", "api.example.com", 443, "/v1")),
        ("HTTPS://API.Example.COM./v1/", ExternalUrl("https", "api.example.com", 443, "/v1")),
        ("http://8.8.8.8:8000/openai/v1", ExternalUrl("http", "8.8.8.8", 8000, "/openai/v1")),
        ("http://[2606:4700::1111]:81", ExternalUrl("http", "2606:4700::1111", 81, "/v1")),
        ("http://bücher.example", ExternalUrl("http", "xn--bcher-kva.example", 80, "/v1")),
        ("http://localhost:11434/v1", ExternalUrl("http", "localhost", 11434, "/v1")),
        ("http://127.0.0.1:8000", ExternalUrl("http", "127.0.0.1", 8000, "/v1")),
        ("http://[::1]:8000", ExternalUrl("http", "::1", 8000, "/v1")),
    ],
)
def test_url_is_parsed_into_parts(text: str, url: ExternalUrl) -> None:
    assert parse_external_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "example.com", "//example.com", "ftp://example.com", "file:///etc/passwd", "http://", "http:///v1"),
        *("http://user@example.com", "http://user:key@example.com", "http://example.com@evil.example", "http://@a.b"),
        *(
            "http://a.b?x=1",
            "http://a.b/#f",
            "http://a.b?",
            "http://a.b#",
            "http://a.b/v1/../admin",
            "http://a.b/%2E%2e",
        ),
        *(
            "http://a b",
            " http://a.b",
            "http://a.b\n",
            "http://a.b\t/v1",
            "http://a\\.b",
            "http://a.b\x00",
            "http://a\u200b.b",
        ),
        *(
            "http://a.b:",
            "http://a.b:0",
            "http://a.b:65536",
            "http://a.b:8o",
            "http://a.b:１",
            "http://a.b:-1",
            "http://a:b:1",
        ),
        *(
            "http://[::1",
            "http://::1",
            "http://[::1%eth0]",
            "http://[fe80::1%25eth0]",
            "http://[127.0.0.1]",
            "http://[]",
        ),
        *(
            "http://-a.b",
            "http://a-.b",
            "http://a..b",
            "http://a.b..",
            "http://.",
            f"http://{'a' * 64}.b",
            "http://a%2eb",
        ),
    ],
)
def test_rejects_invalid_base_url(text: str) -> None:
    with pytest.raises(UrlError):
        parse_external_url(text)


ODD_LOOPBACKS = [
    *(
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0x7f.1",
        "017700000001",
        "127.0.0.1.1",
    ),
    *("127.0.0.01", "127.0.0.256", "1.2.3", "0x", "00000177.0.0.1", "127.0.0.0x1", "0xA9FEA9FE", "2852039166"),
]


@pytest.mark.parametrize("host", ODD_LOOPBACKS)
def test_nonstandard_address_spelling_is_refused(host: str) -> None:
    for text in (f"http://{host}", f"http://{host}./v1", f"https://{host}:80"):
        with pytest.raises(UrlError):
            parse_external_url(text, allow_private=True)


@pytest.mark.parametrize("host", ["１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1", "ⓛocalhost"])
def test_compatibility_characters_are_normalised(host: str) -> None:
    assert parse_external_url(f"http://{host}").host in ("127.0.0.1", "localhost")


FORBIDDEN = [
    *(
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "fe80::1",
        "fd00:ec2::254",
    ),
    *("0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
    *("::ffff:169.254.169.254", "::169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "::ffff:0.0.0.0"),
]
PRIVATE = [
    *("10.0.0.1", "172.16.5.4", "192.168.1.1", "127.0.0.1", "127.9.9.9", "100.64.0.1", "::1", "fc00::1", "fd12::1"),
    *("::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "::127.0.0.1", "198.18.0.1"),
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_metadata_and_unspecified_addresses_are_always_refused(text: str) -> None:
    assert refusal(ipaddress.ip_address(text), allow_private=True) is not None


@pytest.mark.parametrize("text", PRIVATE)
def test_private_address_requires_setting(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert "allowPrivate" in str(refusal(address, allow_private=False))
    assert refusal(address, allow_private=True) is None


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_address_requires_no_setting(text: str) -> None:
    assert refusal(ipaddress.ip_address(text), allow_private=False) is None


def test_loopback_is_allowed_only_by_literal_name() -> None:
    here = ipaddress.ip_address("127.0.0.1")
    for text in ("http://localhost", "http://127.0.0.1", "http://[::1]"):
        assert parse_external_url(text).refusal(here, allow_private=False) is None
    rebound = parse_external_url("http://rebinding.example")
    assert rebound.refusal(here, allow_private=False) is not None
    assert rebound.refusal(here, allow_private=True) is None
    inside = ipaddress.ip_address("10.0.0.1")  # a private one is never implied
    assert parse_external_url("http://localhost").refusal(inside, allow_private=False) is not None
    with pytest.raises(UrlError, match="allowPrivate"):
        parse_external_url("http://10.0.0.1")


ALPHABET = string.ascii_letters + string.digits + "-_.:/@[]%?#\\ \t\n＠。０xX１é\u200d"


@given(st.text(alphabet=ALPHABET, max_size=40).map("http://".__add__) | st.text(max_size=30))
@example("http://a.b:80@127.0.0.1")
@example("http://127.0.0.1#@a.b")
def test_parsed_url_round_trips_and_matches_other_parsers(text: str) -> None:
    """No text has two readings: its own form parses to itself, and the usual parser sees the same host in it."""
    with contextlib.suppress(UrlError):
        url = parse_external_url(text, allow_private=True)
        assert parse_external_url(url.text, allow_private=True) == url
        parts = urlsplit(url.text)
        assert (parts.hostname, parts.port or (443 if url.scheme == "https" else 80)) == (url.host, url.port)
        assert parts.username is None and not parts.query and not parts.fragment and parts.path == url.path


@given(st.integers(0, 2**32 - 1), st.sampled_from(["dec", "hex", "oct", "short", "plain"]), st.booleans())
def test_ipv4_spelling_is_canonical_or_refused(number: int, form: str, dot: bool) -> None:
    """Never another address than the one that the C library would connect to."""
    quad = str(ipaddress.IPv4Address(number))
    spelled = {
        "dec": str(number),
        "hex": hex(number),
        "oct": f"0{number:o}",
        "short": f"{number >> 24}.{number & 0xFFFFFF}",
        "plain": quad,
    }[form]
    with contextlib.suppress(UrlError):
        url = parse_external_url(f"http://{spelled}{'.' if dot else ''}", allow_private=True)
        assert url.host == quad == str(ipaddress.IPv4Address(socket.inet_aton(spelled)))
        assert refusal(ipaddress.IPv4Address(quad), allow_private=True) is None


@given(st.integers(0, 2**128 - 1) | st.integers(0, 2**32 - 1).map(lambda low: (0xFFFF << 32) | low))
def test_ipv6_spelling_is_judged_by_its_address(number: int) -> None:
    address = ipaddress.IPv6Address(number)
    verdict = refusal(address, allow_private=False)
    for spelled in (address.compressed, address.exploded, address.exploded.upper()):
        try:
            assert parse_external_url(f"http://[{spelled}]").host == str(address)
            assert verdict is None or address.is_loopback
        except UrlError as error:
            assert str(error) == str(verdict)


@given(st.ip_addresses(v=4), st.booleans())
def test_mapped_address_is_judged_by_inner_one(address: ipaddress.IPv4Address, allow: bool) -> None:
    for prefix in (0xFFFF << 32, 0x64FF9B << 96):
        outer = ipaddress.IPv6Address(prefix | int(address))
        inner = refusal(address, allow_private=allow)
        assert (refusal(outer, allow_private=allow) is None) == (inner is None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/mcp", "http://tools.internal/mcp?x=1", "https://10.0.0.3/mcp"])
def test_tool_server_may_be_private(url: str) -> None:
    check_server_url(url)


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest", "http://0xa9fea9fe/", "http://[fd00:ec2::254]/mcp", "http://100.100.100.200"],
)
def test_tool_server_at_metadata_address_is_refused(url: str) -> None:
    with pytest.raises(UrlError):
        check_server_url(url)


def test_private_address_error_names_callers_setting() -> None:
    with pytest.raises(UrlError) as caught:
        parse_external_url("http://10.0.0.2/v1")
    assert caught.value.is_private and caught.value.problem == "leads to 10.0.0.2, a private address"
    assert str(caught.value).endswith(": set external.allowPrivate: true if that is meant")
    assert caught.value.with_advice("allow_private").endswith(": set allow_private: true if that is meant")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("0:0:0:0:0:0:0:0", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
        ("gpu-box", "http://gpu-box:80"),
    ],
)
def test_base_url_is_connectable(host: str, url: str) -> None:
    assert base_url(host, 80) == url


_NOT_PRINTABLE = "it is not one line of printable ASCII without spaces"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::1", "localhost"])
@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (b"", "it is empty"),
        *((b"sixteen-letters-%s" % bytes([byte]), _NOT_PRINTABLE) for byte in (0, 9, 10, 31, 32, 127, 128, 255)),
        *((b"sixteen-letters-%s" % bytes([byte]), None) for byte in (33, 48, 126)),
    ],
)
def test_key_is_printable_ascii(host: str, key: bytes, fault: str | None) -> None:
    assert key_fault(key, host) == fault


@pytest.mark.parametrize(("host", "named"), [("", "0.0.0.0"), ("::", "::"), ("10.0.0.3", "10.0.0.3"), ("box", "box")])
def test_key_of_an_exposed_service_has_sixteen_characters(host: str, named: str) -> None:
    assert key_fault(b"k" * 16, host) is None
    assert key_fault(b"k" * 15, host) == f"it has 15 characters; on {named}, which others reach, it needs 16"
    assert key_fault(b"k", "127.0.0.1") is None
