"""Label selectors against a plain reading of Kubernetes' rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.selectors import parse_selector
from areal.errors import UsageFault

KEYS = st.sampled_from(["app", "tier", "in", "notin", "a.b/c-d"])
VALUES = st.sampled_from(["x", "y", "v1.2", "", "in"])
LABELS = st.dictionaries(KEYS, VALUES)


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a!=b", {}, True),
        ("a", {"a": ""}, True),
        ("!a", {"a": "b"}, False),
        ("!a", {}, True),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in (b,c)", {}, False),
        ("a notin (b,c)", {}, True),
        ("a notin (b,c)", {"a": "b"}, False),
        ("a=b,c", {"a": "b", "c": "d"}, True),
        ("a=b,c", {"a": "b"}, False),
        ("in in (in)", {"in": "in"}, True),
        ("in", {"in": ""}, True),
        ("a=", {"a": ""}, True),
    ],
)
def test_selector_over_labels_matches(text: str, labels: dict[str, str], matches: bool) -> None:
    assert parse_selector(text)(labels) is matches


@pytest.mark.parametrize("text", ["", ",", "a=b,", "a in b", "a in (b", "=b", "a=b c", "a = b = c", "!a=b", "a b"])
def test_selector_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageFault):
        parse_selector(text)


@given(KEYS, VALUES, LABELS)
def test_equal_and_unequal_are_opposites(key: str, value: str, labels: dict[str, str]) -> None:
    assert parse_selector(f"{key}={value}")(labels) is not parse_selector(f"{key}!={value}")(labels)


@given(KEYS, st.lists(VALUES, min_size=1), LABELS)
def test_in_is_an_or_of_equals(key: str, values: list[str], labels: dict[str, str]) -> None:
    inside = parse_selector(f"{key} in ({','.join(values)})")(labels)
    assert inside is any(parse_selector(f"{key}={value}")(labels) for value in values)
    assert parse_selector(f"{key} notin ({', '.join(values)})")(labels) is not inside


@given(st.lists(st.sampled_from(["app=x", "tier", "!in", "a.b/c-d notin (y,v1.2)"]), min_size=1), LABELS)
def test_commas_are_ands(terms: list[str], labels: dict[str, str]) -> None:
    assert parse_selector(", ".join(terms))(labels) is all(parse_selector(term)(labels) for term in terms)
