"""How components are started, from specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.reconcilers.kinds.inference_launch import Launch, data_proxy, engine, service_process
from areal.reconcilers.launch import Slot
from areal.reconcilers.observe import key_file, setting
from areal.resources.specs import InferenceServiceSpec
from areal.resources.validation import effective
from areal.runtime.backends.base import NODE_HOST, RunSpec
from areal.wire.fields import read_fields
from areal.wire.processes import DataProxyConfig, EmbeddedEngineConfig, GatewayConfig, RouterConfig
from areal.wire.routing import Readiness
from tests.reconcilers.worlds import model


def proxy_config(folder: Path, **spec: Any) -> Mapping[str, Any]:
    return proxy_run(folder, **spec).config


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


def service_launch(component: str, port: int, host: str = "127.0.0.1") -> Launch:
    slot = Slot(uid="u", ref="InferenceService/home", component=component, replica=0, port=port, host=host)
    item = model({"service": "home"})
    return Launch(item, slot, "/keys/home", "", "/home/routes.json", {"routerUrl": "http://127.0.0.1:20001"})


def test_gateway_config_follows_spec() -> None:
    spec = InferenceServiceSpec.model_validate({"gateway": {"relays": 3}, "strategy": {"drainTimeoutSeconds": 7}})
    run = service_process(service_launch("gateway", 8080, "0.0.0.0"), spec)
    assert run.argv[1:] == ("-P", "-m", "areal.services.inference.gateway")
    assert read_fields(GatewayConfig, run.config) == GatewayConfig(
        host="0.0.0.0",
        admin_key_file="/keys/home",
        drain_timeout=7.0,
        router_url="http://127.0.0.1:20001",
        relays=3,
    )


def test_service_env_reaches_its_processes_and_data_proxies(tmp_path: Path) -> None:
    spec = InferenceServiceSpec.model_validate({"env": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}})
    item = model({"service": "home", "backend": "embedded", "path": str(tmp_path), "env": {"OMP_NUM_THREADS": "1"}})
    slot = Slot(uid="u", ref=str(item.ref), component="data-proxy", replica=0, port=20000)
    launch = Launch(
        item, slot, "/keys/home", "/home/data/qwen", "/home/routes.json", {"engineUrl": "http://127.0.0.1:1"}
    )
    proxy = data_proxy(launch, effective("Model", item.spec), spec)
    services = (service_process(service_launch(*each), spec) for each in (("gateway", 8080), ("router", 20001)))
    for run in (*services, proxy):
        assert run.env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
    assert "OMP_NUM_THREADS" not in proxy.env, "that is the engine's"


def test_router_config_follows_spec() -> None:
    spec = InferenceServiceSpec.model_validate({"router": {"strategy": "prefix"}, "logLevel": "debug"})
    run = service_process(service_launch("router", 20001), spec)
    assert read_fields(RouterConfig, run.config) == RouterConfig(
        port=20001,
        admin_key_file="/keys/home",
        log_level="debug",
        strategy="prefix",
        state_file="/home/routes.json",
    )


def test_run_settings_are_read_from_config_or_flags() -> None:
    run = service_process(service_launch("gateway", 8080, "0.0.0.0"), InferenceServiceSpec())
    flags = replace(run, config={}, argv=(*run.argv, "--host", "0.0.0.0", "--admin-key-file", "/keys/home"))
    for each in (run, flags):
        assert (key_file(each), setting(each, "host"), setting(each, "relays")) == ("/keys/home", "0.0.0.0", None)


@pytest.mark.parametrize(
    ("backend", "given", "passed"),
    [
        ("vllm", {"enablePrefixCaching": False, "seed": None}, ["--no-enable-prefix-caching"]),  # on by default
        ("vllm", {"disable-log-stats": False, "no-enable-lora": False}, []),
        ("vllm", {"hf_overrides.max_position_embeddings": 64}, ["--hf-overrides.max_position_embeddings", "64"]),
        ("vllm", {"compilation-config.use_x": True}, ["--compilation-config.use_x", "true"]),
        (
            "vllm",
            {"hfOverrides.a": False, "hfOverrides.b": [1]},
            ["--hf-overrides.a", "false", "--hf-overrides.b", "[1]"],
        ),
        ("sglang", {"enable-metrics": False, "log-level": "debug"}, ["--log-level", "debug"]),
    ],
)
def test_engine_arguments_have_their_effect(tmp_path: Path, backend: str, given: Any, passed: list[str]) -> None:
    plain = engine_run(tmp_path, backend=backend).argv
    assert list(engine_run(tmp_path, backend=backend, engineArgs=given).argv[len(plain) :]) == passed


def test_vllm_starts_with_control_routes_and_worker_extension(tmp_path: Path) -> None:
    run = engine_run(tmp_path, backend="vllm", env={"PYTHONPATH": "/mine", "AREAL_ENGINE_PYTHON": "/venv/bin/python"})
    at = run.argv.index("--worker-extension-cls")
    module, name = run.argv[at + 1].split(".")
    folder, mine = run.env["PYTHONPATH"].split(":")
    assert mine == "/mine" and name in (Path(folder) / f"{module}.py").read_text()
    assert run.env["VLLM_SERVER_DEV_MODE"] == "1" and run.argv[0] == "/venv/bin/python"
    assert run.env["VLLM_RPC_BASE_PATH"] == "." and run.cwd is None, "its sockets go with the run's folder"


def test_sglang_probe_does_not_sample_by_default(tmp_path: Path) -> None:
    name = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    assert engine_run(tmp_path, backend="sglang").env[name] == "0"
    assert engine_run(tmp_path, backend="sglang", env={name: "1"}).env[name] == "1"


def test_server_exit_is_failure_for_any_exit_code(tmp_path: Path) -> None:
    for run in (engine_run(tmp_path, backend="vllm"), proxy_run(tmp_path)):
        assert run.restart.success_exit_codes == ()


def test_embedded_engine_config_follows_spec(tmp_path: Path) -> None:
    run = engine_run(tmp_path, backend="embedded", lora={"a": str(tmp_path)}, engineArgs={"maxBatchSize": 4})
    assert run.argv[1:] == ("-P", "-m", "areal.services.inference.engines.embedded", "--max-batch-size", "4")
    assert read_fields(EmbeddedEngineConfig, run.config) == EmbeddedEngineConfig(
        port=20001, admin_key_file="/keys/home", model_path=str(tmp_path), lora=(f"a={tmp_path}",)
    )


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ({"backend": "embedded"}, ""),
        ({"backend": "embedded", "resources": {"gpus": 1}}, None),
        ({"backend": "embedded", "engineArgs": {"device": "cuda"}}, None),
        ({"backend": "embedded", "engineArgs": {"device": "cpu"}}, ""),
        ({"backend": "embedded", "env": {"CUDA_VISIBLE_DEVICES": "0"}}, "0"),
        ({"backend": "vllm"}, None),
        ({"backend": "vllm", "resources": {"gpus": 0}}, ""),
    ],
)
def test_engine_without_leased_gpu_sees_none(tmp_path: Path, spec: Any, devices: str | None) -> None:
    assert engine_run(tmp_path, **spec).env.get("CUDA_VISIBLE_DEVICES") == devices


@pytest.mark.parametrize(("backend", "flag"), [("vllm", "--lora-modules"), ("sglang", "--lora-paths")])
def test_adapters_are_passed_in_each_engines_syntax(tmp_path: Path, backend: str, flag: str) -> None:
    argv = engine_run(tmp_path, backend=backend, lora={"a": str(tmp_path), "b": str(tmp_path)}).argv
    at = argv.index(flag)
    assert argv[at + 1 : at + 3] == (f"a={tmp_path}", f"b={tmp_path}")


def test_data_proxy_reads_written_config(tmp_path: Path) -> None:
    written = proxy_config(tmp_path, probes={"readiness": {"periodSeconds": 3}}, replicas=2)
    config = read_fields(DataProxyConfig, written)
    assert (config.engine, config.engine_url, config.state_dir) == (
        "embedded",
        "http://127.0.0.1:20001",
        "/home/data/qwen",
    )
    assert config.registration is not None and config.registration.readiness == Readiness(period_seconds=3.0)
    assert (config.registration.router_file, config.registration.expected) == ("/home/routes.json", 2)


def test_user_flags_override_config(tmp_path: Path) -> None:
    assert proxy_run(tmp_path, proxyArgs={"max-model-len": 64}).argv[-2:] == ("--max-model-len", "64")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"toolCallParser": "qwen"}, ("tool_call_parser", "qwen")),
        ({"reasoningParser": "qwen3"}, ("reasoning_parser", "qwen3")),
    ],
)
def test_data_proxy_starts_with_model_parsers(tmp_path: Path, spec: Any, field: tuple[str, str]) -> None:
    assert proxy_config(tmp_path, **spec)[field[0]] == field[1]
    assert field[0] not in proxy_config(tmp_path)


def test_data_proxy_attaches_to_running_engine(tmp_path: Path) -> None:
    config = proxy_config(tmp_path, backend="sglang:d1", engineUrl="http://10.0.0.2:30000")
    assert (config["engine"], config["engine_url"], config["attached"]) == ("sglang", "http://10.0.0.2:30000", True)
    assert "attached" not in proxy_config(tmp_path)


def test_key_of_running_engine_is_passed_as_secret(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text("sk-of-the-engine\n")
    source = {"file": str(tmp_path / "engine.key")}
    run = proxy_run(tmp_path, backend="vllm", engineUrl="http://10.0.0.2:8000", engineApiKeyFrom=source)
    assert run.secret_env == {"AREAL_ENGINE_API_KEY": "sk-of-the-engine"}
    assert "sk-of-the-engine" not in str((run.argv, run.env, run.spec, run.inputs, run.config))


def test_data_proxy_serves_public_model_name(tmp_path: Path) -> None:
    assert proxy_config(tmp_path)["model"] == "qwen"
    assert proxy_config(tmp_path, servedModelName="Qwen/Qwen3-8B")["model"] == "Qwen/Qwen3-8B"
    external = {"backend": None, "path": None, "external": {"url": "https://api.example.com/v1"}}
    config = proxy_config(tmp_path, servedModelName="best", **external)
    assert (config["model"], config["provider_model"]) == ("best", "qwen"), "over there, the object's"


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_exposed_engine_requires_service_key(tmp_path: Path, backend: str) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    item = model({"service": "home", "path": str(tmp_path), "backend": backend})
    slot = Slot(uid="u", ref=str(item.ref), component="engine", replica=0, port=20001, host=NODE_HOST)
    launch = Launch(item, slot, str(key), "", "")
    run = engine(launch, effective("Model", item.spec), InferenceServiceSpec())
    assert run.secret_env == {"AREAL_ENGINE_KEY": "0123456789abcdef"}
    assert run.argv[run.argv.index("--host") + 1] == NODE_HOST and "0123456789abcdef" not in str((run.argv, run.env))
    plugin = Path(run.env["PYTHONPATH"].split(":")[0])
    if backend == "vllm":
        module, name = run.argv[run.argv.index("--middleware") + 1].split(".")
        assert f"class {name}" in (plugin / f"{module}.py").read_text()
    else:
        assert (plugin / f"{run.argv[2]}.py").is_file()
