"""``areal models``: pull from a stand-in of the hub, list and remove what is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.hub import Hub
from tests.cli.conftest import Areal
from tests.hub_standin import HubStandin, hub_standin

NAME = "org/tiny"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "model.gguf": b"g"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandin]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub_standin() as standin:
        monkeypatch.setenv("HF_ENDPOINT", standin.url)
        yield standin


def test_pull_downloads_once_and_prints_the_folder(areal: Areal, hub: HubStandin) -> None:
    commit = hub.repository(NAME).push(FILES, "first")
    found = areal("models", "pull", NAME)
    assert found.code == 0 and found.out.strip().endswith(f"snapshots/{commit}")
    assert {path.name for path in Path(found.out.strip()).iterdir()} == {"config.json", "model.safetensors"}
    sent = hub.sent
    assert areal("models", "pull", NAME, "-o", "json").json["commit"] == commit
    assert hub.sent == sent
    assert areal("models", "pull", NAME, "--force").code == 0
    assert hub.sent == 2 * sent


@pytest.mark.parametrize("words", [("org/nothing",), (NAME, "--revision", "v9"), ("not an id",)])
def test_pull_of_missing_model_is_not_found(areal: Areal, hub: HubStandin, words: tuple[str, ...]) -> None:
    hub.repository(NAME).push(FILES, "first")
    assert areal("models", "pull", *words).code == 4


def test_list_shows_each_revision_and_its_users(areal: Areal, hub: HubStandin, record: Callable[..., Any]) -> None:
    assert areal("models", "ls").code == 0
    first = hub.repository(NAME).push(FILES, "first")
    areal("models", "pull", NAME)
    second = hub.repository(NAME).push({**FILES, "more.json": b"1"}, "second")
    areal("models", "pull", NAME)
    record("Model", "m", {"backend": "embedded", "path": NAME}, status={"commits": {f"{NAME}@main": first}})
    rows = {row["commit"]: row for row in areal("models", "ls", "-o", "json").items}
    assert rows[second]["revision"] == "main" and rows[second]["usedBy"] == []
    assert rows[first]["revision"] is None and rows[first]["usedBy"] == ["Model/m"]
    assert rows[first]["bytes"] == 1002


def test_remove_asks_and_spares_used_and_shared_files(
    areal: Areal, hub: HubStandin, record: Callable[..., Any]
) -> None:
    first = hub.repository(NAME).push(FILES, "first")
    areal("models", "pull", NAME)
    second = hub.repository(NAME).push({**FILES, "more.json": b"1"}, "second")
    areal("models", "pull", NAME)
    record("Model", "m", {"backend": "embedded", "path": NAME}, status={"commits": {f"{NAME}@main": second}})
    assert areal("models", "rm", "org/other", "--yes").code == 4
    assert areal("models", "rm", NAME, "--revision", first).code == 2  # there is no terminal to ask on
    assert areal("models", "rm", NAME, "--yes").code == 5
    assert areal("models", "rm", NAME, "--revision", first, "--yes").code == 0
    cache = Hub.of()
    kept = cache.cached(NAME)
    assert kept is not None and kept.name == second and (kept / "model.safetensors").read_bytes() == b"w" * 1000
    assert cache.cached_commit(NAME, first) is None
    (cache.repository(NAME) / "refs" / "v1").write_text(second)  # a second name of the commit
    assert areal("models", "rm", NAME, "--revision", "v2", "--yes", "--force").code == 4
    assert areal("models", "rm", NAME, "--revision", "v1", "--yes", "--force").code == 0
    assert not cache.repository(NAME).exists()
