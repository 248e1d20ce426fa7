"""The hub's models and data sets: by Hugging Face's own library against a stand-in of its routes, and from a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.errors import ArealError, NotFound
from areal.hub import COMMITS_VARIABLE, TOKENIZER_FILES, Hub, is_id, missing_shards, model_folder
from areal.reconcilers.kinds.inference_launch import commits_of, hub_models, require_models
from areal.reconcilers.kinds.job_launch import service_environment
from areal.resources.validation import effective
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject
from tests.hub_standin import HubStandin, commit_of, fill_cache, hub_environment, hub_standin  # noqa: F401 - a fixture

NAME = "org/tiny"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 3_000_000,
    "pytorch_model.bin": b"b" * 1000,
    "model.gguf": b"g",
    "tokenizer.json": b"{ }",
    "tokenizer [special].json": b"{  }",
}
KEPT = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer [special].json"}


@pytest.fixture
def standin() -> Iterator[HubStandin]:
    with hub_standin() as found:
        yield found


@pytest.fixture
def hub(standin: HubStandin, tmp_path: Path) -> Hub:
    return Hub(tmp_path / "cache", standin.url)


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen3-8B", "org/na.me_1", "_x/y"])
def test_hub_id_is_recognised(text: str) -> None:
    assert is_id(text)


@pytest.mark.parametrize(
    "text", ["", "/abs", "./x", "../x", "~/x", "a/b/c", "a b", "a/", "a--b", "a..b", "s3://x", "x.git", "a" * 97, "ä/b"]
)
def test_other_text_is_not_an_id(text: str) -> None:
    assert not is_id(text)


def test_snapshot_downloads_useful_files_with_progress(hub: Hub, standin: HubStandin) -> None:
    commit = standin.repository(NAME).push(FILES, "first")
    told: list[tuple[int, int | None]] = []
    folder = hub.snapshot(NAME, report=lambda done, total: told.append((done, total)))
    assert folder.name == commit and {path.name for path in folder.iterdir()} == KEPT
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert told[-1] == (sum(len(FILES[name]) for name in KEPT),) * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_other_weights_are_used_without_safetensors(hub: Hub, standin: HubStandin) -> None:
    standin.repository(NAME).push({"config.json": b"{}", "pytorch_model.bin": b"b"}, "first")
    assert (hub.snapshot(NAME) / "pytorch_model.bin").exists()


def test_branch_moves_but_commit_is_fixed(hub: Hub, standin: HubStandin) -> None:
    first = standin.repository(NAME).push({"config.json": b"1", "model.safetensors": b"w"}, "first")
    assert hub.snapshot(NAME).name == first
    second = standin.repository(NAME).push({"config.json": b"2", "model.safetensors": b"w"}, "second")
    assert hub.commit(NAME) == second != first
    assert hub.snapshot(NAME, first) / "config.json" == hub.cached(NAME, first) / "config.json"  # type: ignore[operator]
    assert (hub.snapshot(NAME) / "config.json").read_text() == "2"
    assert hub.cached_commit(NAME) == second


def test_broken_connection_leaves_no_broken_file(hub: Hub, standin: HubStandin) -> None:
    standin.repository(NAME).push(FILES, "first")
    standin.cut_after = 1_500_000
    assert (hub.snapshot(NAME) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert standin.cut_after is None


def test_raising_progress_stops_download(hub: Hub, standin: HubStandin) -> None:
    standin.repository(NAME).push(FILES, "first")

    def stop(done: int, total: int | None) -> None:
        raise NotFound("stopped")

    with pytest.raises(NotFound, match="stopped"):
        hub.snapshot(NAME, report=stop)
    assert hub.snapshot(NAME).is_dir()


def test_private_model_requires_token(hub: Hub, standin: HubStandin, tmp_path: Path) -> None:
    standin.repository(NAME).push(FILES, "first")
    standin.repository(NAME).token = "hf_secret"
    with pytest.raises(NotFound, match="HF_TOKEN is not set"):
        hub.commit(NAME)
    with pytest.raises(NotFound, match="that token may not"):
        Hub(tmp_path / "cache", standin.url, "hf_other").commit(NAME)
    assert Hub.of({"HF_TOKEN": "hf_secret", "HF_ENDPOINT": standin.url}).snapshot(NAME).is_dir()
    assert "hf_secret" not in repr(Hub.of({"HF_TOKEN": "hf_secret"}))


def test_gated_model_error_links_terms(hub: Hub, standin: HubStandin) -> None:
    standin.repository(NAME).push(FILES, "first")
    standin.repository(NAME).gated = True
    with pytest.raises(ArealError, match="gated") as caught:
        hub.commit(NAME)
    assert f"{standin.url}/{NAME}" in str(caught.value.hint)


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_unknown_revision_is_named(hub: Hub, standin: HubStandin, revision: str) -> None:
    standin.repository(NAME).push(FILES, "first")
    with pytest.raises(NotFound, match=f"no revision '{revision}'"):
        hub.snapshot(NAME, revision)


def test_unknown_model_differs_from_unreachable_hub(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"{NAME} is not at {hub.endpoint}") as unknown:
        hub.commit(NAME)
    with pytest.raises(ArealError, match="cannot be reached at http") as silent:
        Hub(tmp_path / "cache", "http://127.0.0.1:9").commit(NAME)
    for caught in (unknown, silent):
        assert "name it by its path" in str(caught.value.hint)


def weights(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


@pytest.mark.parametrize("how", ["offline", "unreachable", "down"])
def test_cache_suffices_when_hub_is_unreachable(how: str, standin: HubStandin, tmp_path: Path) -> None:
    commit = fill_cache(tmp_path / "cache", NAME, weights(tmp_path / "w"))
    standin.down = how == "down"
    hub = {
        "offline": Hub(tmp_path / "cache", standin.url, offline=True),
        "unreachable": Hub(tmp_path / "cache", "http://127.0.0.1:9"),
        "down": Hub(tmp_path / "cache", standin.url),
    }[how]
    assert hub.snapshot(NAME).name == hub.commit(NAME) == commit
    assert hub.snapshot(NAME, commit) == hub.cached(NAME)
    if how == "offline":
        assert standin.asked == []
        with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
            hub.snapshot("org/other")
        with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
            hub.snapshot(NAME, "v2")


def test_settings_match_hub_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Hub.of().cache == tmp_path / "hf" / "hub"
    assert Hub.of({"HF_HUB_CACHE": "/x"}).cache == Path("/x")
    assert Hub.of({"HF_HUB_OFFLINE": "1"}).offline and not Hub.of({"HF_HUB_OFFLINE": "0"}).offline
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Hub.of().cache == tmp_path / ".cache" / "huggingface" / "hub"


@pytest.mark.parametrize(
    ("names", "index", "missing"),
    [
        (["model.safetensors"], None, []),
        (["model-00001-of-00002.safetensors"], None, ["model-00002-of-00002.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None, []),
        ([], ["a.safetensors"], ["a.safetensors"]),
        (["a.safetensors"], ["a.safetensors", "b.safetensors"], ["b.safetensors"]),
    ],
)
def test_missing_shards_of_interrupted_download_are_found(
    tmp_path: Path, names: list[str], index: list[str] | None, missing: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    if index is not None:
        map_ = {str(number): name for number, name in enumerate(index)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_}))
    assert list(missing_shards(tmp_path)) == missing


def test_interrupted_download_is_not_a_model(standin: HubStandin, tmp_path: Path) -> None:
    folder = weights(tmp_path / "w")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    fill_cache(tmp_path / "cache", NAME, folder)
    hub = Hub(tmp_path / "cache", offline=True)
    assert hub.cached(NAME) is None and hub.cached_commit(NAME) == commit_of(NAME)
    with pytest.raises(NotFound, match="only in part"):
        hub.snapshot(NAME)


@pytest.mark.parametrize("lost", ["never downloaded", "blob removed"])
def test_cache_without_weights_has_tokenizer_but_no_model(lost: str, tmp_path: Path) -> None:
    folder = weights(tmp_path / "w")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"")
    if lost == "never downloaded":
        (folder / "model.safetensors").unlink()
    commit = fill_cache(tmp_path / "cache", NAME, folder)
    hub = Hub(tmp_path / "cache", offline=True)
    if lost == "blob removed":
        (hub.repository(NAME) / "snapshots" / commit / "model.safetensors").resolve().unlink()
    with pytest.raises(NotFound, match="only in part"):
        hub.commit(NAME)
    assert hub.commit(NAME, only=TOKENIZER_FILES) == commit
    assert (hub.has(NAME), hub.has(NAME, only=TOKENIZER_FILES)) == (False, True)


def test_model_folder_is_a_folder_or_an_id(
    standin: HubStandin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", standin.url)
    commit = standin.repository(NAME).push(FILES, "first")
    assert model_folder(NAME).name == commit
    Path(NAME).mkdir(parents=True)
    assert model_folder(NAME) == Path(NAME)  # a folder here comes first
    assert model_folder("./nothing") == Path("nothing")  # and is not looked for anywhere else


def test_driver_uses_commit_of_its_model(standin: HubStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", standin.url)
    first = standin.repository(NAME).push(FILES, "first")
    assert model_folder(NAME).name == first
    second = standin.repository(NAME).push({**FILES, "config.json": b"{  }"}, "second")
    assert model_folder(NAME).name == first  # the reference and the actor of one run are of one commit
    monkeypatch.setenv(COMMITS_VARIABLE, json.dumps({NAME: second}))
    assert model_folder(NAME).name == second
    standin.repository(NAME).push({"config.json": b"{   }"}, "third")
    assert model_folder(NAME).name == second
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_folder(NAME).name == second


def _model(status: dict[str, Any] | None = None, **spec: Any) -> StoredObject:
    layer = Layer("apply", {"service": "s", "backend": "vllm", **spec}, None, "", 0.0)
    return StoredObject("Model", "m", "u", layers=(layer,), created_at=0.0, status=status or {})


def test_model_commits_are_recorded_ones() -> None:
    recorded = {"commits": {f"{NAME}@v2": "b", f"{NAME}@main": "a", "org/t@main": "c"}}
    stored = _model(recorded, path=NAME, revision="v2", tokenizerPath="org/t")
    assert commits_of(stored, effective("Model", stored.spec)) == {NAME: "b", "org/t": "c"}


def test_foreign_tokenizer_is_downloaded_without_weights() -> None:
    stored = _model(path=NAME, tokenizerPath="org/t", lora={"a": "org/a"}, backend="embedded:d1")
    models = hub_models(stored, effective("Model", stored.spec))
    assert {model.id: model.only for model in models} == {NAME: None, "org/t": TOKENIZER_FILES, "org/a": None}


def test_running_engine_needs_no_weights(standin: HubStandin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", standin.url)
    standin.repository(NAME).push(FILES, "first")
    (tmp_path / "here").mkdir()
    attached: dict[str, Any] = {"path": NAME, "engineUrl": "http://127.0.0.1:9"}
    own = _model(**attached, tokenizerPath=str(tmp_path / "here"))
    require_models({"Model/m": own}, lambda ref, what: None)
    assert list(hub_models(own, effective("Model", own.spec))) == [] and standin.asked == []
    shared = _model(**attached)
    (model,) = hub_models(shared, effective("Model", shared.spec))
    folder = Hub(tmp_path / "cache", standin.url).snapshot(model.id, model.revision, only=model.only)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "tokenizer [special].json"}


def test_driver_gets_the_commits_of_its_model(tmp_path: Path) -> None:
    store = ObjectStore(Home(tmp_path))
    store.put(_model({"commits": {f"{NAME}@v2": "b"}}, path=NAME, revision="v2"))
    hands: Any = SimpleNamespace(store=store, service_url=lambda op, ref: "http://s", key_file=lambda ref: "k")
    op: Any = None
    spec = effective("TrainJob", {"driver": "a:b", "rollout": {"service": "s", "model": "m"}})
    told = service_environment(hands, op, spec)
    assert (told["AREAL_INFERENCE_MODEL"], json.loads(told[COMMITS_VARIABLE])) == ("m", {NAME: "b"})
    elsewhere = effective("TrainJob", {"driver": "a:b", "rollout": {"service": "s", "model": "other"}})
    assert COMMITS_VARIABLE not in service_environment(hands, op, elsewhere)
