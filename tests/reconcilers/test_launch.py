"""The argv of components, from specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.reconcilers.launch import Launch, Slot, data_proxy, engine
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.registry import effective
from areal.runtime.backends.base import RunSpec
from tests.reconcilers.worlds import model


def proxy_argv(folder: Path, **spec: Any) -> tuple[str, ...]:
    return proxy_run(folder, **spec).argv


def proxy_run(folder: Path, **spec: Any) -> RunSpec:
    item = model({"service": "home", "backend": "embedded", "path": str(folder), **spec})
    slot = Slot(uid="u", ref=str(item.ref), component="data-proxy", replica=0, port=20000)
    launch = Launch(
        item, slot, "/keys/home", "/home/data/qwen", "/home/routes.json", {"engineUrl": "http://127.0.0.1:20001"}
    )
    return data_proxy(launch, effective("Model", item.spec), InferenceServiceSpec())


def engine_run(folder: Path, **spec: Any) -> RunSpec:
    item = model({"service": "home", "path": str(folder), **spec})
    slot = Slot(uid="u", ref=str(item.ref), component="engine", replica=0, port=20001)
    launch = Launch(item, slot, "/keys/home", "/home/data/qwen", "/home/routes.json")
    return engine(launch, effective("Model", item.spec), InferenceServiceSpec())


def test_vllm_is_started_with_its_control_routes_and_our_extension_of_its_workers(tmp_path: Path) -> None:
    run = engine_run(tmp_path, backend="vllm", env={"PYTHONPATH": "/mine", "AREAL_ENGINE_PYTHON": "/venv/bin/python"})
    at = run.argv.index("--worker-extension-cls")
    module, name = run.argv[at + 1].split(".")
    folder, mine = run.env["PYTHONPATH"].split(":")
    assert mine == "/mine" and name in (Path(folder) / f"{module}.py").read_text()
    assert run.env["VLLM_SERVER_DEV_MODE"] == "1" and run.argv[0] == "/venv/bin/python"


@pytest.mark.parametrize(
    ("backend", "flag"), [("embedded", "--lora"), ("vllm", "--lora-modules"), ("sglang", "--lora-paths")]
)
def test_adapters_reach_every_engine_in_its_own_spelling(tmp_path: Path, backend: str, flag: str) -> None:
    argv = engine_run(tmp_path, backend=backend, lora={"a": str(tmp_path), "b": str(tmp_path)}).argv
    at = argv.index(flag)
    assert argv[at + 1 : at + 3] == (f"a={tmp_path}", f"b={tmp_path}")


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        ({"toolCallParser": "qwen"}, ("--tool-call-parser", "qwen")),
        ({"reasoningParser": "qwen3"}, ("--reasoning-parser", "qwen3")),
    ],
)
def test_data_proxy_is_started_with_the_models_parsers(tmp_path: Path, spec: Any, flags: tuple[str, ...]) -> None:
    argv = proxy_argv(tmp_path, **spec)
    at = argv.index(flags[0])
    assert argv[at : at + 2] == flags


def test_data_proxy_without_parsers_has_no_flags_for_them(tmp_path: Path) -> None:
    assert not {"--tool-call-parser", "--reasoning-parser"} & set(proxy_argv(tmp_path))


def test_data_proxy_of_an_engine_that_runs_already_is_pointed_at_it(tmp_path: Path) -> None:
    argv = proxy_argv(tmp_path, backend="sglang:d1", engineUrl="http://10.0.0.2:30000")
    at = argv.index("--engine")
    assert argv[at : at + 5] == ("--engine", "sglang", "--engine-url", "http://10.0.0.2:30000", "--attached")
    assert "--attached" not in proxy_argv(tmp_path)


def test_key_of_an_engine_that_runs_already_goes_by_a_secret(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text("sk-of-the-engine\n")
    source = {"file": str(tmp_path / "engine.key")}
    run = proxy_run(tmp_path, backend="vllm", engineUrl="http://10.0.0.2:8000", engineApiKeyFrom=source)
    assert run.secret_env == {"AREAL_ENGINE_API_KEY": "sk-of-the-engine"}
    assert "sk-of-the-engine" not in str((run.argv, run.env, run.spec, run.inputs))


def test_data_proxy_serves_the_name_that_clients_send(tmp_path: Path) -> None:
    def said(argv: tuple[str, ...], flag: str) -> str | None:
        return argv[argv.index(flag) + 1] if flag in argv else None

    assert said(proxy_argv(tmp_path), "--model") == "qwen"
    assert said(proxy_argv(tmp_path, servedModelName="Qwen/Qwen3-8B"), "--model") == "Qwen/Qwen3-8B"
    external = {"backend": None, "path": None, "external": {"url": "https://api.example.com/v1"}}
    named = proxy_argv(tmp_path, servedModelName="best", **external)
    assert (said(named, "--model"), said(named, "--provider-model")) == ("best", "qwen"), "over there, the object's"
