"""How each component is started: its argv, environment, ports and what is remembered about it.

Keys never appear here: components read the admin key from the 0600 file that ``--admin-key-file`` names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import areal
from areal.errors import ArealError
from areal.reconcilers.components import inference_part
from areal.reconcilers.replicas import replica_count
from areal.resources.bind import base_url
from areal.resources.blocks import LivenessProbe
from areal.resources.engine_flags import flag_name
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.model import ModelSpec
from areal.resources.paths import resolve_model_path
from areal.runtime.backends.base import HttpProbe, RestartPolicy, RunSpec
from areal.state.records import StoredObject

LOOPBACK = "127.0.0.1"
# Routers and gateways speak plain HTTP to components alone; reading every CA certificate at import is half their start.
PLAIN_HTTP = {"SSL_CERT_FILE": os.devnull}


@dataclass(frozen=True)
class Slot:
    """A place for a run, claimed before anything starts: its uid, its port and where it will answer."""

    uid: str
    ref: str
    component: str
    replica: int
    port: int
    host: str = LOOPBACK
    shared: bool = False  # the port is held together with the predecessor's

    @property
    def url(self) -> str:
        return base_url(self.host, self.port)


@dataclass(frozen=True)
class Launch:
    """Everything a launcher may need: the object, its service, the slot, neighbours' URLs. ``data_folder`` is where all
    data proxies of the model record, ``router_file`` what the service's router keeps. ``successor``: it starts beside
    the run that it is to replace."""

    object: StoredObject
    slot: Slot
    admin_key_file: str
    data_folder: str
    router_file: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    successor: bool = False
    folders: Mapping[str, str] = field(default_factory=dict)  # of Hugging Face ids


def router(launch: Launch, spec: InferenceServiceSpec) -> RunSpec:
    argv = _python("areal.services.inference.router", launch, spec.log_level)
    argv += ["--strategy", spec.router.strategy, "--state-file", launch.router_file]
    return _run(launch, argv, _restart(spec.restart), spec.strategy.drain_timeout_seconds, env=PLAIN_HTTP)


def gateway(launch: Launch, spec: InferenceServiceSpec) -> RunSpec:
    argv = _python("areal.services.inference.gateway", launch, spec.log_level)
    argv += ["--router-url", str(launch.inputs["routerUrl"]), "--relays", str(spec.gateway.relays)]
    argv += ["--drain-timeout", str(spec.strategy.drain_timeout_seconds)]
    return _run(launch, argv, _restart(spec.restart), spec.strategy.drain_timeout_seconds, env=PLAIN_HTTP)


def data_proxy(launch: Launch, spec: ModelSpec, service: InferenceServiceSpec) -> RunSpec:
    argv = _python("areal.services.inference.data_proxy", launch, service.log_level)
    argv += ["--model", spec.served_model_name or launch.object.name]
    argv += ["--drain-timeout", str(_strategy(spec, service).drain_timeout_seconds)]
    argv += ["--state-dir", launch.data_folder, "--registration", json.dumps(_registration(launch, spec))]
    secret_env: dict[str, str] = {}
    if spec.external is not None:
        argv += ["--engine", "external", "--engine-url", spec.external.url, "--provider-api", spec.external.api]
        if spec.external.allow_private:
            argv.append("--allow-private")
        if spec.external.model or spec.served_model_name:
            argv += ["--provider-model", spec.external.model or launch.object.name]
        if spec.external.api_key_from is not None:
            secret_env["AREAL_PROVIDER_API_KEY"] = secret_of(spec.external.api_key_from, launch.object)
    else:
        argv += [
            "--engine",
            inference_part(spec.backend or "embedded").engine,
            "--engine-url",
            str(spec.engine_url or launch.inputs["engineUrl"]),
            *(["--attached"] if spec.engine_url else []),
        ]
        if spec.engine_api_key_from is not None:
            secret_env["AREAL_ENGINE_API_KEY"] = secret_of(spec.engine_api_key_from, launch.object)
        argv += ["--model-path", _folder(spec.path, launch)]
        argv += ["--tokenizer-path", _folder(spec.tokenizer_path or spec.path, launch)]
        if spec.chat_template:
            argv += ["--chat-template", _folder(spec.chat_template, launch)]
        if spec.tool_call_parser:
            argv += ["--tool-call-parser", spec.tool_call_parser]
        if spec.reasoning_parser:
            argv += ["--reasoning-parser", spec.reasoning_parser]
    argv += flags(spec.proxy_args)
    return _run(launch, argv, _restart(spec.restart), 10.0, secret_env=secret_env, liveness=spec.probes.liveness)


def _registration(launch: Launch, spec: ModelSpec) -> dict[str, Any]:
    """How a data proxy registers itself at its router. A successor gets no calls before the command routes it in."""
    return {
        "router_file": launch.router_file,
        "worker_id": launch.slot.uid,
        "expected": replica_count(spec),
        "readiness": spec.probes.readiness.model_dump(by_alias=False, mode="json"),
        "held": launch.successor,
    }


def engine(launch: Launch, spec: ModelSpec, service: InferenceServiceSpec) -> RunSpec:
    part = inference_part(spec.backend or "embedded")
    path = _folder(spec.path, launch)
    builders = {"embedded": _embedded, "vllm": _vllm, "sglang": _sglang}
    if part.engine not in builders:
        raise ArealError(
            f"{launch.object.ref}: backend {part.engine!r} is not an inference engine",
            hint="use embedded, vllm or sglang, or external: {url: ...}",
        )
    argv = builders[part.engine](launch, spec, path, service.log_level)
    env = {**_threads(spec), **(_vllm_env(spec.env) if part.engine == "vllm" else spec.env)}
    if launch.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpus)
    secret_env = {name: secret_of(source, launch.object) for name, source in spec.env_from.items()}
    liveness = spec.probes.liveness
    return _run(launch, argv, _restart(spec.restart), 10.0, env=env, secret_env=secret_env, liveness=liveness)


def _threads(spec: ModelSpec) -> dict[str, str]:
    """``resources.cpus`` bounds the threads that the numeric libraries start."""
    cpus = spec.resources.cpus
    return {} if cpus is None else {"OMP_NUM_THREADS": str(max(1, int(cpus)))}


def _embedded(launch: Launch, spec: ModelSpec, path: str, log_level: str) -> list[str]:
    argv = _python("areal.services.inference.engines.embedded", launch, log_level)
    argv += ["--model-path", path]
    if spec.lora:
        argv += ["--lora", *_adapters(spec, launch)]
    return [*argv, *flags(spec.engine_args)]


def _vllm(launch: Launch, spec: ModelSpec, path: str, log_level: str) -> list[str]:
    dims = inference_part(spec.backend or "")
    python = str(spec.env.get("AREAL_ENGINE_PYTHON", sys.executable))
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    argv += ["--host", launch.slot.host, "--port", str(launch.slot.port)]
    argv += ["--tensor-parallel-size", str(dims.tensor)]
    argv += ["--pipeline-parallel-size", str(dims.pipeline), "--worker-extension-cls", "areal_vllm.Worker"]
    argv += ["--logprobs-mode", "processed_logprobs"]  # those of the request's temperature
    if spec.lora:
        argv += ["--enable-lora", "--lora-modules", *_adapters(spec, launch)]
    return [*argv, *flags(spec.engine_args)]


def _vllm_env(given: Mapping[str, str]) -> dict[str, str]:
    """Its pause, version, weight and adapter routes are there in its development mode only; it listens on loopback.

    Our extension of its workers is found by PYTHONPATH: its environment need not have areal.
    """
    plugin = str(Path(areal.__file__).parent / "services" / "inference" / "engines" / "vllm_plugin")
    path = given.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    modes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return {**modes, **given, "PYTHONPATH": f"{plugin}{os.pathsep}{path}" if path else plugin}


def _sglang(launch: Launch, spec: ModelSpec, path: str, log_level: str) -> list[str]:
    dims = inference_part(spec.backend or "")
    python = str(spec.env.get("AREAL_ENGINE_PYTHON", sys.executable))
    argv = [python, "-m", "sglang.launch_server", "--model-path", path]
    argv += ["--host", launch.slot.host, "--port", str(launch.slot.port)]
    argv += ["--tp-size", str(dims.tensor), "--pp-size", str(dims.pipeline)]
    if spec.lora:
        argv += ["--enable-lora", "--lora-paths", *_adapters(spec, launch)]
    return [*argv, *flags(spec.engine_args)]


def _adapters(spec: ModelSpec, launch: Launch) -> list[str]:
    """LoRA adapters as both engines spell them, ``name=path``, in the manifest's order."""
    return [f"{name}={_folder(path, launch)}" for name, path in spec.lora.items()]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """``{maxBatchSize: 8, trust_remote_code: true}`` -> ``--max-batch-size 8 --trust-remote-code``. What is false or
    null is left out, a map is JSON."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = "--" + flag_name(str(name))
        if value is True:
            argv.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, list):
            argv += [flag, *(_word(item) for item in value)]
        else:
            argv += [flag, _word(value)]
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _python(module: str, launch: Launch, log_level: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        module,
        "--host",
        launch.slot.host,
        "--port",
        str(launch.slot.port),
        "--admin-key-file",
        launch.admin_key_file,
        "--log-level",
        log_level,
    ]


def _run(
    launch: Launch,
    argv: list[str],
    restart: RestartPolicy,
    grace_s: float,
    *,
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, str] | None = None,
    liveness: LivenessProbe | None = None,
) -> RunSpec:
    slot, probe = launch.slot, liveness or LivenessProbe()
    return RunSpec(
        uid=slot.uid,
        owner=slot.ref,
        component=slot.component,
        replica=slot.replica,
        argv=tuple(argv),
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        secret_env=dict(secret_env or {}),
        ports=() if slot.shared else (slot.port,),
        shared_ports=(slot.port,) if slot.shared else (),
        gpus=launch.gpus,
        url=slot.url,
        generation=launch.object.generation,
        spec=launch.object.spec,
        inputs=dict(launch.inputs),
        restart=restart,
        liveness=HttpProbe(f"{slot.url}/health", probe.period_seconds, probe.timeout_seconds, probe.failure_threshold),
        stop_grace_s=min(grace_s, 10.0),
    )


def _restart(restart: Any) -> RestartPolicy:
    return RestartPolicy(
        policy=restart.policy,
        initial_backoff_s=restart.backoff.initial_seconds,
        factor=restart.backoff.factor,
        max_backoff_s=restart.backoff.max_seconds,
        jitter=restart.backoff.jitter,
        budget_count=restart.budget.count,
        budget_window_s=restart.budget.window_seconds,
    )


def _strategy(spec: ModelSpec, service: InferenceServiceSpec) -> Any:
    return spec.strategy or service.strategy


def _folder(path: str | None, launch: Launch) -> str:
    """An absolute folder: the path's own, or that of the snapshot of a Hugging Face id."""
    if not path:
        raise ArealError(f"{launch.object.ref}: spec.path is not set", hint="name a folder or a Hugging Face id")
    return resolve_model_path(path, source_file(launch.object)) or launch.folders.get(path, path)


def source_file(stored: StoredObject) -> str | None:
    for layer in stored.layers:
        if layer.source and layer.source.get("file"):
            return str(layer.source["file"])
    return None


def secret_of(key_from: Any, stored: StoredObject) -> str:
    """Resolve ``apiKeyFrom: {env|file}`` at spawn; the value travels by a 0600 file, never by argv or state."""
    if key_from.env:
        value = os.environ.get(key_from.env, "")
        if not value:
            raise ArealError(
                f"{stored.ref}: environment variable {key_from.env} is not set",
                hint=f"export {key_from.env}=... and apply again",
            )
        return value
    try:
        return Path(key_from.file).expanduser().read_text().strip()
    except OSError as error:
        raise ArealError(
            f"{stored.ref}: the secret's file {key_from.file} cannot be read: {error.strerror}",
            hint="write it, readable by you alone, and apply again",
        ) from error
