"""``config.yaml``: reading, writing, and the verbs over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.config import config_text
from areal.cli.options import read_config
from areal.state.home import Home
from tests.cli.conftest import Areal

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
PLAIN = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}", fullmatch=True)
CONTEXTS = st.dictionaries(PLAIN, st.dictionaries(st.sampled_from(["gateway", "apiKeyFile"]), WORDS, min_size=1))


@given(CONTEXTS, st.dictionaries(st.sampled_from(["output", "service"]), WORDS))
def test_written_config_reads_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, contexts: dict[str, Any], defaults: dict[str, str]
) -> None:
    config = {"contexts": contexts, "defaults": defaults}
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config_text(config), encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        assert (yaml.safe_load(file) or {}) == {name: part for name, part in config.items() if part}
    assert read_config(str(path)) == {name: part for name, part in config.items() if part}


def test_flow_style_is_read(home: Home) -> None:
    home.ensure()
    home.config.write_text("defaults: {output: wide}\ncontexts: {c: {gateway: 'http://h:1'}}\n")
    assert read_config(str(home.config)) == {
        "defaults": {"output": "wide"},
        "contexts": {"c": {"gateway": "http://h:1"}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "does not hold a map"),
        ("defaults: [1]\n", "defaults does not hold a map"),
        ("contexts: {c: x}\n", "map of maps"),
        ("defalts: {output: json}\n", 'did you mean "defaults"'),
        ("defaults: {outptu: json}\n", 'did you mean "output"'),
        ("{\n", "is not YAML"),
    ],
)
def test_invalid_config_error_names_file(areal: Areal, home: Home, text: str, message: str) -> None:
    home.ensure()
    home.config.write_text(text)
    result = areal("get")
    assert result.code == 1
    assert message in result.err and str(home.config) in result.err


@pytest.mark.parametrize("name", ["timeout", "lockTimeout"])
def test_invalid_default_duration_error_names_its_place(
    areal: Areal, record: Callable[..., Any], home: Home, name: str
) -> None:
    record("Model", "m", {})
    home.config.write_text(f"defaults: {{{name}: soon}}\n")
    result = areal("delete", "model/m", "--yes")
    assert result.code == 1
    assert (
        f'{home.config}: defaults.{name}: "soon" is not a duration' in result.err and "write 90, 90s, 5m" in result.err
    )


def test_flags_override_defaults(areal: Areal) -> None:
    assert areal("config", "set", "output", "json").code == 0
    assert areal("version").json["version"]
    assert areal("version", "-o", "table").out.startswith("areal ")
    assert areal("config", "unset", "output").code == 0
    assert areal("version").out.startswith("areal ")


@pytest.mark.parametrize(("name", "value"), [("output", "jsn"), ("timeout", "soon"), ("service", "Not_a_name")])
def test_unusable_default_is_refused(areal: Areal, name: str, value: str) -> None:
    assert areal("config", "set", name, value).code == 2


def test_contexts_are_added_used_and_removed(areal: Areal) -> None:
    assert areal("config", "set-context", "lab", "--gateway", "10.0.0.5:8080", "--api-key-file", "~/k").code == 0
    assert areal("config", "use-context", "lab").code == 0
    assert areal("config", "current-context").out == "lab\n"
    rows = areal("config", "get-contexts", "--json").items
    assert [(row["name"], row["current"], row["gateway"]) for row in rows] == [
        ("local", False, None),
        ("lab", True, "http://10.0.0.5:8080"),
    ]
    assert areal("config", "delete-context", "lab").code == 0
    assert areal("config", "current-context").out == "local\n"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:notaport", ""])
def test_context_with_invalid_gateway_url_is_refused(areal: Areal, url: str) -> None:
    assert areal("config", "set-context", "lab", "--gateway", url).code == 2


def test_context_named_local_is_refused(areal: Areal) -> None:
    assert areal("config", "set-context", "local", "--gateway", "http://h").code == 2


def test_local_verb_refuses_remote_context(areal: Areal) -> None:
    areal("config", "set-context", "lab", "--gateway", "http://10.0.0.5:8080")
    areal("config", "use-context", "lab")
    refused = areal("reconcile")
    assert refused.code == 5
    assert "--context local" in refused.err
    assert areal("reconcile", "--context", "local").code == 0
