"""Starts the processes of a service and of its models: router, gateway, engines and data proxies; and downloads the
Hugging Face snapshots that they read.

No key appears here: the processes read the admin key from the 0600 file that ``admin_key_file`` names.

An id's revision is resolved once: the commit is recorded in the object's status (``commits``, by ``id@revision``), and
every later start uses it. A changed ``path`` or ``revision`` is resolved again. Missing ids are reported before a
plan's first effect; files are downloaded when the first process needs them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError
from areal.hub import MAIN, TOKENIZER_FILES, ByteReporter, Hub, Kind, is_id
from areal.installation import module_argv
from areal.reconcilers.kinds import StageReporter, host_of
from areal.reconcilers.kinds.engine_commands import ENGINE_COMMANDS, engine_env
from areal.reconcilers.kinds.model_plan import ENGINE, gpus_per_replica, readiness_of, replica_count
from areal.reconcilers.launch import (
    NO_GPUS,
    EffectContext,
    Interrupted,
    Slot,
    restart_policy,
    run_spec,
    secret_of,
    source_file,
)
from areal.reconcilers.plan import Op, StartRun
from areal.resources.addresses import is_loopback
from areal.resources.agent_spec import AgentServiceSpec
from areal.resources.backend import flag_name, inference_part
from areal.resources.job_spec import TrainJobSpec
from areal.resources.kinds import Ref, parse_ref, service_ref
from areal.resources.paths import looks_local, resolve_model_path
from areal.resources.specs import InferenceServiceSpec, ModelSpec
from areal.resources.validation import effective
from areal.runtime.backends.base import RunSpec
from areal.state.home import Home, read_key
from areal.state.records import StoredObject
from areal.wire.fields import write_fields
from areal.wire.processes import (
    DataProxyConfig,
    EmbeddedEngineConfig,
    GatewayConfig,
    RegistrationConfig,
    RouterConfig,
    ServeConfig,
)
from areal.wire.routing import Readiness

# Routers and gateways speak plain HTTP to components only; reading all CA certificates would take half their start
# time.
PLAIN_HTTP = {"SSL_CERT_FILE": os.devnull}


@dataclass(frozen=True)
class Launch:
    """The inputs of a launcher: the object, its service, the slot, and the URLs of neighboring processes.
    ``data_folder``: where all data proxies of the model record. ``router_file``: the state file of the service's
    router. ``successor``: the run starts beside the one that it replaces."""

    object: StoredObject
    slot: Slot
    admin_key_file: str
    data_folder: str
    router_file: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    successor: bool = False
    folders: Mapping[str, str] = field(default_factory=dict)  # of Hugging Face ids

    def address(self, log_level: str) -> dict[str, Any]:
        """Return the fields of every configuration: the address, the admin key's file, the log level."""
        about = {"host": self.slot.host, "port": self.slot.port, "admin_key_file": self.admin_key_file}
        return {**about, "log_level": log_level}

    def registration(self, expected: int, readiness: Readiness) -> RegistrationConfig:
        """Return how a data proxy registers at its router. A successor is held until it is routed."""
        return RegistrationConfig(
            router_file=self.router_file,
            worker_id=self.slot.uid,
            expected=expected,
            readiness=readiness,
            held=self.successor,
        )

    def run(
        self,
        argv: list[str],
        spec: InferenceServiceSpec | ModelSpec | AgentServiceSpec,
        config: ServeConfig | None,
        grace_s: float = 10.0,
        **options: Any,
    ) -> RunSpec:
        options |= {"inputs": self.inputs, "gpus": self.gpus, "config": write_fields(config) if config else {}}
        restart = replace(restart_policy(spec.restart), success_exit_codes=())  # a server that ends has failed
        return run_spec(self.object, self.slot, argv, restart, grace_s, **options)


def launch_of(context: EffectContext, op: Op[StartRun], slot: Slot, engine_input: str = "engineUrl") -> Launch:
    """Return the launch of an op of a service or of one of its models."""
    service, inputs = host_of(context.object(op.ref)) or op.ref, dict(op.args.inputs)
    if op.args.router:
        inputs["routerUrl"] = context.url(op, op.args.router)
    if op.args.engine:
        inputs[engine_input] = context.url(op, op.args.engine)
    return Launch(
        object=context.object(op.ref),
        slot=slot,
        admin_key_file=context.key_file(service),
        data_folder=str(context.ctx.home.data / parse_ref(op.ref).name),
        router_file=str(router_file(context.ctx.home, parse_ref(service))),
        inputs=inputs,
        successor=op.args.successor,
    )


def router_file(home: Home, service: Ref) -> Path:
    """Return the file with the registrations at a service's router, and the router's address."""
    return home.object_folder(service) / "routes.json"


def service_run(context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
    return service_process(launch_of(context, op, slot), context.spec_of(op.ref))


def service_process(launch: Launch, spec: InferenceServiceSpec) -> RunSpec:
    """Return the run of a service's router or gateway."""
    name, about = launch.slot.component, launch.address(spec.log_level)
    grace_s = spec.strategy.drain_timeout_seconds
    if name == "router":
        config: ServeConfig = RouterConfig(**about, strategy=spec.router.strategy, state_file=launch.router_file)
    else:
        url = str(launch.inputs["routerUrl"])
        config = GatewayConfig(**about, drain_timeout=grace_s, router_url=url, relays=spec.gateway.relays)
    return launch.run(service_argv(f"inference.{name}"), spec, config, grace_s, env={**PLAIN_HTTP, **spec.env})


def model_run(context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
    spec: ModelSpec = context.spec_of(op.ref)
    service: InferenceServiceSpec = context.spec_of(service_ref(context.object(op.ref).spec))

    def report(name: str, done: int, total: int | None) -> None:
        if context.ctx.interrupted.is_set():
            raise Interrupted(op)  # the next command resumes the download
        context.report(op, f"downloading {name}", done, total)

    need = gpus_per_replica(spec) if slot.component == ENGINE else 0
    launch = replace(
        launch_of(context, op, slot),
        gpus=context.backend.named(slot.backend).claim_gpus(need, owner=slot.ref) if need else (),
        folders=_folders(context, context.object(op.ref), spec, report),
    )
    return (engine if slot.component == ENGINE else data_proxy)(launch, spec, service)


def data_proxy(launch: Launch, spec: ModelSpec, service: InferenceServiceSpec) -> RunSpec:
    """Return the run of a data proxy. ``proxy_args`` become flags, which override its configuration."""
    secret_env: dict[str, str] = {}
    source: dict[str, Any]
    if spec.external is not None:
        source = {
            "engine": "external",
            "engine_url": spec.external.url,
            "provider_api": spec.external.api,
            "allow_private": spec.external.allow_private,
            "provider_model": spec.external.model or (launch.object.name if spec.served_model_name else None),
        }
        if spec.external.api_key_from is not None:
            secret_env["AREAL_PROVIDER_API_KEY"] = secret_of(spec.external.api_key_from, launch.object)
    else:
        source = {
            "engine": inference_part(spec.backend or "embedded").engine,
            "engine_url": str(spec.engine_url or launch.inputs["engineUrl"]),
            "attached": spec.engine_url is not None,
            "model_path": _folder(spec.path, launch),
            "tokenizer_path": _folder(spec.tokenizer_path or spec.path, launch),
            "chat_template": _folder(spec.chat_template, launch) if spec.chat_template else None,
            "tool_call_parser": spec.tool_call_parser or None,
            "reasoning_parser": spec.reasoning_parser or None,
        }
        if spec.engine_api_key_from is not None:
            secret_env["AREAL_ENGINE_API_KEY"] = secret_of(spec.engine_api_key_from, launch.object)
    config = DataProxyConfig(
        **launch.address(service.log_level),
        model=spec.served_model_name or launch.object.name,
        drain_timeout=(spec.strategy or service.strategy).drain_timeout_seconds,
        state_dir=launch.data_folder,
        registration=launch.registration(replica_count(spec), readiness_of(spec)),
        **source,
    )
    argv = service_argv("inference.data_proxy", spec.proxy_args)
    return launch.run(argv, spec, config, env=service.env, secret_env=secret_env, liveness=spec.probes.liveness)


def engine(launch: Launch, spec: ModelSpec, service: InferenceServiceSpec) -> RunSpec:
    part = inference_part(spec.backend or "embedded")
    path = _folder(spec.path, launch)
    config = None
    secret_env = {name: secret_of(source, launch.object) for name, source in spec.env_from.items()}
    if part.engine == "embedded":
        argv = service_argv("inference.engines.embedded", spec.engine_args)
        lora = tuple(_adapters(spec, launch))
        config = EmbeddedEngineConfig(**launch.address(service.log_level), model_path=path, lora=lora)
    elif part.engine in ENGINE_COMMANDS:
        command = ENGINE_COMMANDS[part.engine]
        keyed = not is_loopback(launch.slot.host)
        argv = [str(spec.env.get("AREAL_ENGINE_PYTHON", sys.executable)), "-m", command.module, command.model, path]
        argv += ["--host", launch.slot.host, "--port", str(launch.slot.port)]
        argv += [command.tensor, str(part.tensor), command.pipeline, str(part.pipeline), *command.settings]
        if keyed:
            argv += ["--middleware", "areal_vllm.RequireKey"] if part.engine == "vllm" else []
            secret_env["AREAL_ENGINE_KEY"] = read_key(Path(launch.admin_key_file))
        if spec.lora:
            argv += ["--enable-lora", command.adapters, *_adapters(spec, launch)]
        argv += flags(spec.engine_args, command.switches)
    else:
        raise ArealError(
            f"{launch.object.ref}: backend {part.engine!r} is not an inference engine",
            hint="use embedded, vllm or sglang, or external: {url: ...}",
        )
    cpus = spec.resources.cpus  # bounds the threads that the numeric libraries start
    threads = {} if cpus is None else {"OMP_NUM_THREADS": str(max(1, int(cpus)))}
    devices = {} if gpus_per_replica(spec) else NO_GPUS
    env = {**threads, **devices, **(engine_env(part.engine, spec.env) if part.engine in ENGINE_COMMANDS else spec.env)}
    return launch.run(argv, spec, config, env=env, secret_env=secret_env, liveness=spec.probes.liveness)


def service_argv(name: str, arguments: Mapping[str, object] = MappingProxyType({})) -> list[str]:
    """Return the argv of a service process. ``arguments`` of the spec become flags, which override its
    configuration."""
    return module_argv(f"areal.services.{name}", *flags(arguments))


def _adapters(spec: ModelSpec, launch: Launch) -> list[str]:
    """Return LoRA adapters as both engines write them, ``name=path``, in the manifest's order."""
    return [f"{name}={_folder(path, launch)}" for name, path in spec.lora.items()]


def _folder(path: str | None, launch: Launch) -> str:
    """Return an absolute folder: the path itself, or the snapshot of a Hugging Face id."""
    if not path:
        raise ArealError(f"{launch.object.ref}: spec.path is not set", hint="name a folder or a Hugging Face id")
    return resolve_model_path(path, source_file(launch.object)) or launch.folders.get(path, path)


def flags(arguments: Mapping[str, object], switches: Collection[str] | None = None) -> list[str]:
    """Return ``--max-batch-size 8 --trust-remote-code`` for ``{maxBatchSize: 8, trust_remote_code: true}``. A map, and
    a value of a ``flag.key``, becomes JSON. Null values are left out, and false ones if ``switches`` is None. Otherwise
    all flags but the ``switches`` are set to false by their form ``--no-``."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = flag_name(str(name))
        if value is None:
            continue
        if "." in flag:
            argv += ["--" + flag, value if isinstance(value, str) else json.dumps(value)]
        elif value is False:
            argv += [] if switches is None or flag in switches or flag.startswith("no-") else ["--no-" + flag]
        else:
            items = value if isinstance(value, list) else [value] if value is not True else []
            argv += ["--" + flag, *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in items)]
    return argv


COMMITS = "commits"
_PARALLEL = 8
_downloads: dict[str, threading.Lock] = {}


@dataclass(frozen=True)
class HubModel:
    """A Hugging Face id in a manifest, and the requested revision. ``only``: the files that are needed."""

    id: str
    revision: str = MAIN
    only: tuple[str, ...] | None = None
    kind: Kind = "model"

    @property
    def key(self) -> str:
        return f"{self.id}@{self.revision}"


def hub_models(stored: StoredObject, spec: ModelSpec) -> Iterator[HubModel]:
    """Yield the ids among a Model's paths: weights, tokenizer, adapters. An attached engine already has its weights and
    needs only the tokenizer."""
    if spec.external is not None:
        return
    attached = spec.engine_url is not None
    weights = () if attached else (spec.path, *spec.lora.values())
    paths = {spec.path: spec.revision or MAIN} if spec.path and not (attached and spec.tokenizer_path) else {}
    for path in (spec.tokenizer_path, *spec.lora.values()):
        if path:
            paths.setdefault(path, MAIN)
    for path, revision in paths.items():
        if not looks_local(path) and is_id(path) and resolve_model_path(path, source_file(stored)) is None:
            yield HubModel(path, revision, None if path in weights else TOKENIZER_FILES)


def commits_of(stored: StoredObject, spec: ModelSpec) -> dict[str, str]:
    """Return the recorded commit of each id."""
    known = stored.status.get(COMMITS, {})
    return {model.id: known[model.key] for model in hub_models(stored, spec) if model.key in known}


def recovered_status(stored: StoredObject, runs: Sequence[RunSpec]) -> dict[str, object]:
    """Return the commits of the ids with which these processes, oldest first, were started, by ``id@revision``."""
    text = json.dumps([(run.argv, run.config) for run in runs])
    models = hub_models(stored, effective(stored.kind, stored.spec))
    folders = {model.key: Hub(Path()).repository(model.id, model.kind).name for model in models}
    found = {key: re.findall(f"/{re.escape(name)}/snapshots/(\\w+)", text) for key, name in folders.items()}
    commits = {key: each[-1] for key, each in found.items() if each}
    return {COMMITS: commits} if commits else {}


def hub_of(stored: StoredObject, spec: ModelSpec | TrainJobSpec) -> Hub:
    """Return the hub for the object's own settings: HF_TOKEN, HF_HOME, HF_ENDPOINT, ... in ``env`` and ``envFrom``."""
    names = [name for name in spec.env_from if name.startswith(("HF_", "HUGGING"))]
    secrets = {name: secret_of(spec.env_from[name], stored) for name in names}
    return Hub.of({**spec.env, **secrets})


def require_models(models: Mapping[str, StoredObject], report: StageReporter) -> None:
    """Raise NotFound or ArealError for the first id that neither the cache nor the hub has."""
    wanted: list[tuple[str, Hub, HubModel]] = []
    for ref, stored in models.items():
        spec, known = effective(stored.kind, stored.spec), stored.status.get(COMMITS, {})
        found = [model for model in hub_models(stored, spec) if model.key not in known]
        wanted += [(ref, hub_of(stored, spec), model) for model in found]
    require_ids(wanted, report)


def require_ids(wanted: Sequence[tuple[str, Hub, HubModel]], report: StageReporter) -> None:
    """Raise NotFound or ArealError for the first of the ids, each needed by the object of a ref, that neither its cache
    nor its hub has. ``report`` gets the object's ref and the current step."""
    if not wanted:
        return

    def require(item: tuple[str, Hub, HubModel]) -> None:
        ref, hub, model = item
        report(ref, f"looking for {model.id}")
        try:
            hub.commit(model.id, model.revision, model.kind, only=model.only)
        except ArealError as error:
            raise type(error)(f"{ref}: {error.message}", hint=error.hint) from error

    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="hub") as pool:
        list(pool.map(require, wanted))


def _folders(
    context: EffectContext, stored: StoredObject, spec: ModelSpec, report: Callable[[str, int, int | None], None]
) -> dict[str, str]:
    """Return the folder of each id of a Model, and record its commit. Each id is downloaded once, however many
    processes need it. ``report`` gets the id, the bytes done, and the total. Raises NotFound, ArealError."""
    hub, found = hub_of(stored, spec), {}
    for model in hub_models(stored, spec):
        with _downloads.setdefault(f"{hub.cache}:{model.key}", threading.Lock()):
            found[model.id] = str(_folder_of(context, stored, hub, model, partial(report, model.id)))
    return found


def _folder_of(context: EffectContext, stored: StoredObject, hub: Hub, model: HubModel, report: ByteReporter) -> Path:
    known = (context.store.get(stored.ref) or stored).status.get(COMMITS, {}).get(model.key)
    folder = hub.cached(model.id, known, only=model.only) if known else None
    if folder is None:
        began = time.monotonic()
        folder = hub.snapshot(model.id, known or model.revision, only=model.only, report=report)
        with context.lock:
            context.deadline.at += time.monotonic() - began
    if known != folder.name:
        with context.lock:
            status = (context.store.get(stored.ref) or stored).status
            commits = {**status.get(COMMITS, {}), model.key: folder.name}
            context.store.put_statuses({stored.ref: {**status, COMMITS: commits}})
    return folder
