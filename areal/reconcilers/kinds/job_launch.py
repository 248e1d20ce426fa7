"""Start the driver of a TrainJob: its folder, its configuration's file, its command and its environment."""

from __future__ import annotations

import json
from pathlib import Path

from areal.errors import ArealError, UsageFault
from areal.hub import COMMITS_VARIABLE
from areal.installation import module_argv
from areal.reconcilers.kinds.inference_launch import commits_of
from areal.reconcilers.kinds.job_config import choose_driver, config_file, config_tree
from areal.reconcilers.kinds.job_status import DRIVER
from areal.reconcilers.launch import NO_GPUS, EffectContext, Slot, restart_policy, secret_of, source_file
from areal.reconcilers.plan import Op, StartRun
from areal.resources.job_spec import TrainJobSpec
from areal.resources.kinds import parse_ref, served_name
from areal.resources.paths import looked_in
from areal.resources.validation import effective
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import RunSpec
from areal.state.files import read_json, write_atomic, write_json
from areal.state.home import VARIABLE, Home
from areal.state.records import StoredObject

STOP_GRACE_S = 60.0  # a driver may write a checkpoint
_FOREVER_S = 1e9
_HOPELESS = (2, 3)  # wrong usage, an invalid configuration: the next attempt would fail in the same way
_OWNER = "job.json"
_INLINE = "given.yaml"


def driver_run(context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
    """Return the run of a job's driver. Raises ArealError naming what is missing."""
    stored = context.store.get(parse_ref(op.ref)) or context.object(op.ref)  # as recorded: with its uid
    spec: TrainJobSpec = effective("TrainJob", stored.spec)
    resumes = _folder_owner(context.ctx.home.jobs / stored.name) == stored.uid
    folder = _own_folder(context.ctx.home, stored)
    runs = context.observed.of(op.ref, DRIVER) if resumes else ()  # an earlier job of this name ran elsewhere
    earlier = max(runs, key=lambda run: run.uid, default=None)
    cwd = spec.working_dir or (earlier.state.spec.cwd if earlier is not None else None) or str(Path.cwd())
    if slot.backend == LOCAL and not Path(cwd).is_dir():
        message = f"{op.ref}: spec.workingDir: there is no folder {cwd}"
        raise UsageFault(message, hint="create it, or replace the job with another one: areal apply --replace")
    inputs, count = dict(op.args.inputs), op.args.gpus or 0
    on_end = module_argv("areal.reconcilers.background", str(context.ctx.home.root), "job-end", op.ref)
    gpus = context.backend.named(slot.backend).claim_gpus(count, owner=op.ref) if count else ()
    return RunSpec(
        uid=slot.uid,
        owner=op.ref,
        component=DRIVER,
        replica=0,
        argv=tuple(_argv(spec, stored, folder, Path(cwd), slot)),
        ports=(slot.port,) if slot.port else (),
        nodes=spec.resources.nodes,
        backend=slot.backend,
        scheduler=slot.scheduler,
        env={
            "PYTHONUNBUFFERED": "1",
            VARIABLE: str(context.ctx.home.root),
            **(NO_GPUS if spec.resources.gpus == 0 else {}),
            **spec.env,
            **service_environment(context, op, spec),
            "AREAL_RUN_FOLDER": str(folder),
            "AREAL_ATTEMPT": str(inputs["attempt"]),
        },
        secret_env={name: secret_of(source, stored) for name, source in spec.env_from.items()},
        cwd=cwd,
        gpus=gpus,
        generation=stored.generation,
        spec=stored.spec,
        inputs=inputs,
        restart=restart_policy(
            spec.restart,
            budget_count=int(inputs["restartsAllowed"]),
            budget_window_s=_FOREVER_S,
            final_exit_codes=_HOPELESS,
        ),
        stop_grace_s=STOP_GRACE_S,
        on_end=tuple(on_end),
    )


def _own_folder(home: Home, stored: StoredObject) -> Path:
    """Return the job's folder: configuration, metrics, checkpoints, trajectories. The folder of an earlier job of the
    same name is renamed, since a new job must neither resume from its checkpoints nor destroy them."""
    folder = home.jobs / stored.name
    mark = folder / _OWNER
    if folder.exists():
        owner = _folder_owner(folder) or "earlier"
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


def _folder_owner(folder: Path) -> str:
    """Return the uid of the job to which a folder belongs; "" if it is not recorded."""
    try:
        return str(read_json(folder / _OWNER)["uid"])
    except (FileNotFoundError, ArealError, KeyError, TypeError):
        return ""


def _argv(spec: TrainJobSpec, stored: StoredObject, folder: Path, cwd: Path, slot: Slot) -> list[str]:
    config = _config_file(spec, stored, folder, cwd)
    driver = choose_driver(spec.driver, config_tree(config, spec.overrides), str(config or stored.ref))
    words = [*(["--config", str(config)] if config is not None else []), *spec.overrides]
    processes, nodes = spec.resources.processes_per_node, spec.resources.nodes
    launch = ["areal.training.launch", "--processes", str(processes)]
    launch += ["--nodes", str(nodes), "--run", slot.uid, "--port", str(slot.port)] if nodes > 1 else []
    started = [*launch, "--"] if processes * nodes > 1 else ["areal.training"]
    return [*module_argv(*started), "--driver", driver, "--", *words]


def _config_file(spec: TrainJobSpec, stored: StoredObject, folder: Path, cwd: Path) -> Path | None:
    """Return the configuration's file: relative to the working folder, or else to the manifest. A map is written to a
    file."""
    if spec.config is None:
        return None
    if not isinstance(spec.config, str):
        write_atomic(folder / _INLINE, json.dumps(spec.config, indent=1) + "\n")  # JSON is YAML
        return folder / _INLINE
    manifest = source_file(stored)
    found = config_file(spec.config, cwd, manifest)
    if found is None:
        raise UsageFault(f"{stored.ref}: there is no spec.config {spec.config!r}", hint=looked_in(str(cwd), manifest))
    return found.resolve()


def service_environment(context: EffectContext, op: Op[StartRun], spec: TrainJobSpec) -> dict[str, str]:
    """Return the environment variables for the model that the job samples from and updates."""
    if spec.rollout is None:
        return {}
    ref = f"InferenceService/{spec.rollout.service}"
    variables = {
        "AREAL_INFERENCE_ADDR": context.service_url(op, ref),
        "AREAL_INFERENCE_KEY_FILE": context.key_file(ref),
        "AREAL_INFERENCE_SERVICE": ref,  # its record: where it is, if it moves
    }
    if not spec.rollout.model:
        return variables
    if spec.rollout.agents is not None:
        ref = f"AgentService/{spec.rollout.agents}"
        variables["AREAL_AGENTS_ADDR"] = context.service_url(op, ref)
        variables["AREAL_AGENTS_KEY_FILE"] = context.key_file(ref)
        variables["AREAL_AGENTS_SERVICE"] = ref
    model = context.store.get(parse_ref(f"Model/{spec.rollout.model}"))
    if model is None:
        return {**variables, "AREAL_INFERENCE_MODEL": spec.rollout.model}
    variables["AREAL_INFERENCE_MODEL"] = served_name(model.name, model.spec)
    if commits := commits_of(model, effective("Model", model.spec)):
        variables[COMMITS_VARIABLE] = json.dumps(commits)
    return variables
