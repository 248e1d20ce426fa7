"""Starts the processes of an agent service: router, gateway, and a worker and a data proxy for each pair.

A worker starts in ``workingDir``, by default the folder where the service was first applied. That folder and the
manifest's are on its import path. Missing folders, modules and programs are reported before it starts, without
importing the agent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from areal.errors import UsageFault
from areal.reconcilers.desired import Wanted
from areal.reconcilers.kinds import StageReporter
from areal.reconcilers.kinds.agent_plan import WORKER, readiness_of, session_settings
from areal.reconcilers.kinds.inference_launch import PLAIN_HTTP, Launch, launch_of, service_argv
from areal.reconcilers.kinds.service_plan import inference_inputs
from areal.reconcilers.launch import EffectContext, Fault, Slot, secret_faults, secret_of, source_file
from areal.reconcilers.plan import Op, StartRun
from areal.resources.agent_spec import AgentServiceSpec
from areal.resources.kinds import Ref, parse_ref, served_name
from areal.resources.nodes import Diagnostic
from areal.resources.paths import import_fault, import_path, looked_in
from areal.resources.resource import Resource
from areal.resources.tree import FieldPath, path_text
from areal.runtime.backends.base import RunSpec
from areal.wire.processes import (
    AgentDataProxyConfig,
    AgentGatewayConfig,
    AgentWorkerConfig,
    InferenceAccess,
    RouterConfig,
)

_OF_SETUP = 0.75  # of a pair's start deadline, so that a tool server that hangs is reported within it


def agent_run(context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
    """Return the run of an op. Raises ArealError naming what is missing."""
    spec: AgentServiceSpec = context.spec_of(op.ref)
    launch = launch_of(context, op, slot, "workerUrl")
    launch = replace(launch, data_folder=str(context.ctx.home.sessions / parse_ref(op.ref).name))
    if slot.component == WORKER:
        return _worker(context, launch, spec)
    about = {**launch.address(spec.log_level), "drain_timeout": spec.drain_timeout_seconds}
    grace_s = spec.drain_timeout_seconds
    if slot.component == "router":
        config = RouterConfig(**launch.address(spec.log_level), state_file=launch.router_file)
        return launch.run(service_argv("inference.router"), spec, config, grace_s, env=PLAIN_HTTP)
    access = _inference(context, op, spec)
    if spec.inference is not None:
        called = f"InferenceService/{spec.inference.service}"
        inputs = inference_inputs(context.spec_of(called), context.service_url(op, called))
        launch = replace(launch, inputs={**launch.inputs, **inputs})
    if slot.component == "gateway":
        gateway = AgentGatewayConfig(
            **about,
            service=launch.object.name,
            router_url=str(launch.inputs["routerUrl"]),
            inference=() if access is None else (access,),
        )
        return launch.run(service_argv("agent.gateway"), spec, gateway, grace_s, env=PLAIN_HTTP)
    proxy = AgentDataProxyConfig(
        **about,
        **session_settings(spec),
        service=launch.object.name,
        worker_url=str(launch.inputs["workerUrl"]),
        state_dir=launch.data_folder,
        registration=launch.registration(spec.pairs, readiness_of(spec)),
        inference=access,
    )
    return launch.run(service_argv("agent.data_proxy"), spec, proxy, grace_s, env=PLAIN_HTTP)


def _inference(context: EffectContext, op: Op[StartRun], spec: AgentServiceSpec) -> InferenceAccess | None:
    """Return the access to the inference service that records the sessions. Raises ArealError if the service or its
    model is no longer recorded."""
    if spec.inference is None:
        return None
    ref, model = f"InferenceService/{spec.inference.service}", None
    if spec.inference.model is not None:
        found = context.object(f"Model/{spec.inference.model}")
        model = served_name(found.name, found.spec)
    return InferenceAccess(addr=context.service_url(op, ref), admin_key_file=context.key_file(ref), model=model)


def _worker(context: EffectContext, launch: Launch, spec: AgentServiceSpec) -> RunSpec:
    runs = (run.state.spec for run in context.observed.of(str(launch.object.ref), WORKER))
    applied_in = (run.cwd for run in runs if not run.spec.get("workingDir"))  # earlier versions did not record it
    folder, file = Path(spec.working_dir or next(filter(None, applied_in), Path.cwd())), source_file(launch.object)
    for path, message, hint in _faults(spec, folder, file):
        raise UsageFault(f"{launch.object.ref}: {path_text(('spec', *path))}: {message}", hint=hint)
    config = AgentWorkerConfig(
        **launch.address(spec.log_level),
        agent=spec.agent,
        kwargs=spec.kwargs or None,
        command=tuple(spec.command),
        tools=tuple(tool.model_dump(mode="json", exclude_defaults=True) for tool in spec.tools),
        import_path=tuple(_import_folders(folder, file)),
        connect_timeout=spec.setup_timeout_seconds * _OF_SETUP,
    )
    secret_env = {name: secret_of(source, launch.object) for name, source in spec.env_from.items()}
    argv = service_argv("agent.worker")
    return launch.run(argv, spec, config, env=spec.env, secret_env=secret_env, cwd=str(folder))


def _import_folders(folder: Path, file: str | None) -> list[str]:
    """Return the folders of an agent's modules: the working folder and the manifest's folder."""
    return list(dict.fromkeys([str(folder), *([str(Path(file).parent)] if file is not None else [])]))


def agent_faults(items: Sequence[tuple[Wanted, Resource]], report: StageReporter) -> dict[Ref, list[Diagnostic]]:
    """Return the faults that would keep services from starting."""
    faults: dict[Ref, list[Diagnostic]] = {}
    for wanted, resource in items:
        spec = AgentServiceSpec.model_validate(wanted.spec)
        found = [*_faults(spec, Path(spec.working_dir or Path.cwd()), (wanted.source or {}).get("file") or None)]
        found += secret_faults(wanted.spec.get("envFrom") or {})
        if found:
            faults[resource.ref] = [resource.fault(*each) for each in found]
    return faults


def _faults(spec: AgentServiceSpec, folder: Path, file: str | None) -> Iterator[Fault]:
    """Yield missing folders, modules and programs."""
    if not folder.is_dir():
        yield ("workingDir",), f"there is no folder {str(folder)!r}", None
        return
    places = [*_import_folders(folder, file), *import_path(folder, spec.env)]
    if spec.agent is not None and (fault := import_fault(spec.agent, places)) is not None:
        hint = f"{looked_in(str(folder), file)}, in PYTHONPATH and where packages are installed"
        yield ("agent",), f"agent {spec.agent!r}: {fault}", hint
    programs: list[tuple[FieldPath, list[str]]] = [(("command",), spec.command)]
    programs += [(("tools", n, "mcp", "command"), tool.mcp.command) for n, tool in enumerate(spec.tools)]
    for path, command in programs:
        if not command:
            continue
        program = str(folder / command[0]) if "/" in command[0] else command[0]  # a bare name is searched in PATH
        if shutil.which(program, path=spec.env.get("PATH")) is None:
            yield path, f"there is no program {command[0]!r}", f"looked in {folder} and in PATH"
