"""How a job's driver is started: its folder, its words, what it is told of the service that it samples from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from areal.errors import ArealError, UsageFault
from areal.hub import COMMITS_VARIABLE
from areal.reconcilers.effect_context import EffectContext
from areal.reconcilers.kinds.job_config import choose_driver, read_config
from areal.reconcilers.kinds.job_plan import services_of
from areal.reconcilers.kinds.job_status import DRIVER
from areal.reconcilers.kinds.model_files import commits_of
from areal.reconcilers.launch import Slot, secret_of, source_file
from areal.reconcilers.plan import Op
from areal.resources.addresses import base_url
from areal.resources.kinds import check_name, parse_ref, served_name
from areal.resources.specs import InferenceServiceSpec, TrainJobSpec
from areal.resources.validation import effective
from areal.runtime.backends.base import RestartPolicy, RunSpec
from areal.state.files import read_json, write_atomic, write_json
from areal.state.home import Home
from areal.state.records import StoredObject

STOP_GRACE_S = 60.0  # a driver may write a checkpoint
_FOREVER_S = 1e9
_HOPELESS = (2, 3)  # wrong usage, an invalid configuration: the next attempt would say the same
_OWNER = "job.json"
_INLINE = "given.yaml"


def job_folder(home: Home, name: str) -> Path:
    """What a job makes: configuration, metrics, checkpoints, trajectories."""
    return home.jobs / check_name(name)


def driver_run(context: EffectContext, op: Op, slot: Slot) -> RunSpec:
    """Raises ArealError saying what is missing."""
    stored = context.store.get(parse_ref(op.ref)) or context.object(op.ref)  # as recorded: with its uid
    spec: TrainJobSpec = effective("TrainJob", stored.spec)
    if spec.resources.nodes > 1:
        raise UsageFault(f"{op.ref}: spec.resources.nodes {spec.resources.nodes} needs a cluster's scheduler")
    folder = _own_folder(context.ctx.home, stored)
    cwd = spec.working_dir or _earlier_cwd(context, op.ref) or os.getcwd()  # noqa: PTH109 - a string is wanted
    inputs = dict(op.args["inputs"])
    count = int(op.args["gpus"])
    gpus = context.backend.named(slot.backend).claim_gpus(count, owner=op.ref) if count else ()
    return RunSpec(
        uid=slot.uid,
        owner=op.ref,
        component=DRIVER,
        replica=0,
        argv=tuple(_argv(spec, stored, folder, Path(cwd))),
        backend=slot.backend,
        env={
            "PYTHONUNBUFFERED": "1",
            **spec.env,
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            **_service(context, spec),
            "AREAL_RUN_FOLDER": str(folder),
            "AREAL_ATTEMPT": str(inputs["attempt"]),
        },
        secret_env={name: secret_of(source, stored) for name, source in spec.env_from.items()},
        cwd=cwd,
        gpus=gpus,
        generation=stored.generation,
        spec=stored.spec,
        inputs=inputs,
        restart=_restart(spec, int(inputs["restartsAllowed"])),
        stop_grace_s=STOP_GRACE_S,
        on_end=_on_end(context, op.ref),
    )


def _on_end(context: EffectContext, ref: str) -> tuple[str, ...]:
    """The service that the job brought goes when the driver has ended for good."""
    if not any(services_of(context.store.list("InferenceService"), ref)):
        return ()
    return (sys.executable, "-m", "areal.reconcilers.job_end", str(context.ctx.home.root), ref)


def _own_folder(home: Home, stored: StoredObject) -> Path:
    """The job's folder. That of an earlier job of the same name is set aside: a new job must not go on from its
    checkpoints, and they must not be lost."""
    folder = job_folder(home, stored.name)
    mark = folder / _OWNER
    if folder.exists():
        try:
            owner = str(read_json(mark)["uid"])
        except (FileNotFoundError, ArealError, KeyError, TypeError):
            owner = "earlier"
        if owner != stored.uid:
            aside = folder.with_name(f"{folder.name}.{owner[:8]}")
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}.{owner[:8]}-{number}")
            folder.rename(aside)
    if not mark.exists():
        write_json(mark, {"uid": stored.uid, "job": str(stored.ref)})
    return folder


def _earlier_cwd(context: EffectContext, ref: str) -> str | None:
    runs = context.observed.of(ref, DRIVER)
    return next((run.state.spec.cwd for run in sorted(runs, key=lambda run: run.uid, reverse=True)), None)


def _argv(spec: TrainJobSpec, stored: StoredObject, folder: Path, cwd: Path) -> list[str]:
    config = _config_file(spec, stored, folder, cwd)
    content = read_config(config) if config is not None else {}
    driver = choose_driver(spec.driver, content, spec.overrides, str(config or stored.ref))
    words = [*(["--config", str(config)] if config is not None else []), *spec.overrides]
    processes = spec.resources.processes_per_node
    started = ["areal.training.launch", "--processes", str(processes), "--"] if processes > 1 else ["areal.training"]
    return [sys.executable, "-m", *started, "--driver", driver, "--", *words]


def _config_file(spec: TrainJobSpec, stored: StoredObject, folder: Path, cwd: Path) -> Path | None:
    """A file's path is read from where the driver runs, else from beside the manifest. A map becomes a file."""
    if spec.config is None:
        return None
    if not isinstance(spec.config, str):
        write_atomic(folder / _INLINE, json.dumps(spec.config, indent=1) + "\n")  # JSON is YAML
        return folder / _INLINE
    source = source_file(stored)
    bases = [cwd, *([Path(source).absolute().parent] if source else [])]
    for base in bases:
        found = base / Path(spec.config).expanduser()
        if found.is_file():
            return found.resolve()
    looked = ", ".join(dict.fromkeys(map(str, bases)))
    raise UsageFault(f"{stored.ref}: there is no spec.config {spec.config!r}", hint=f"looked in {looked}")


def _service(context: EffectContext, spec: TrainJobSpec) -> dict[str, str]:
    """Where the model is that the job samples from and updates."""
    if spec.rollout is None:
        return {}
    ref = f"InferenceService/{spec.rollout.service}"
    service: InferenceServiceSpec = context.spec_of(ref)
    told = {
        "AREAL_INFERENCE_ADDR": base_url(service.gateway.host, service.gateway.port),
        "AREAL_INFERENCE_KEY_FILE": context.key_file(ref),
    }
    if not spec.rollout.model:
        return told
    model = context.store.get(parse_ref(f"Model/{spec.rollout.model}"))
    if model is None:
        return {**told, "AREAL_INFERENCE_MODEL": spec.rollout.model}
    told["AREAL_INFERENCE_MODEL"] = served_name(model.name, model.spec)
    if commits := commits_of(model, effective("Model", model.spec)):
        told[COMMITS_VARIABLE] = json.dumps(commits)
    return told


def _restart(spec: TrainJobSpec, allowed: int) -> RestartPolicy:
    backoff: Any = spec.restart.backoff
    return RestartPolicy(
        policy=spec.restart.policy,
        initial_backoff_s=backoff.initial_seconds,
        factor=backoff.factor,
        max_backoff_s=backoff.max_seconds,
        jitter=backoff.jitter,
        budget_count=allowed,
        budget_window_s=_FOREVER_S,
        final_exit_codes=_HOPELESS,
    )
