"""Reads a job's configuration, and checks a job before anything is started for it. No user module is imported.

The one reader of a configuration is that of its driver. It runs in a process (``areal.training.checking``), which is
asked for the faults, and for values that refer to others (``${actor.path}``). Other values are as they are written.

The driver is the spec's (or the command line's), otherwise a top-level ``driver:`` of the configuration, otherwise the
built-in driver for its ``trainer.type``. ``actor.backend`` (or ``allocation_mode``) such as ``fsdp:d4`` means four
processes; ``spec.resources`` may say the same, or replace it.

A driver is searched as its process will search it: in the working folder, then PYTHONPATH, then the interpreter's own
path. Each fault has a position in the manifest or in the configuration's file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areal.errors import InvalidManifest, UsageFault, did_you_mean
from areal.installation import install_command, module_argv
from areal.reconcilers.desired import Wanted
from areal.reconcilers.kinds import StageReporter
from areal.reconcilers.kinds.scheduling_spec import Placement, placement_of
from areal.reconcilers.launch import secret_faults
from areal.resources.backend import Allocation, BackendError, Part, engine_arguments, parse_backend
from areal.resources.job_spec import DRIVER, DRIVERS
from areal.resources.kinds import BACKENDS, TRAIN_ENGINES, Ref
from areal.resources.nodes import Diagnostic, ManifestError, Pos
from areal.resources.paths import import_fault, import_path, looked_in, looks_local, module_of
from areal.resources.resource import Resource
from areal.resources.tree import (
    ABSENT,
    TRAINERS,
    BadOverride,
    apply_override,
    get_path,
    lifted,
    parse_override,
    path_text,
)
from areal.runtime.backends import LOCAL, declared_backend

BUILT_IN = {kind: driver for kind, (driver, _) in DRIVERS.items()}
_TYPE = "trainer.type"


def _folder(job: Wanted) -> Path:
    return Path(str(job.spec.get("workingDir") or Path.cwd()))


def read_config(path: Path) -> dict[str, object]:
    """Return the configuration as it is written, with nothing resolved. Raises UsageFault, ManifestError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageFault(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        pos = Pos(str(path), mark.line + 1, mark.column + 1) if mark is not None else Pos(str(path), 1, 1)
        problem = getattr(error, "problem", None) or str(error)
        raise ManifestError([Diagnostic(pos, "", f"the configuration is not valid YAML: {problem}")]) from error
    if data is not None and not isinstance(data, dict):
        message = f"the configuration must be a map, not {type(data).__name__}"
        raise ManifestError([Diagnostic(Pos(str(path), 1, 1), "", message)])
    return data or {}


def config_file(given: str, folder: Path, manifest: str | None) -> Path | None:
    """Return the configuration's file: relative to the working folder, or else to the folder of the manifest's file."""
    bases = [folder, *([Path(manifest).parent] if manifest else [])]
    return next((found for base in bases if (found := base / Path(given).expanduser()).is_file()), None)


def config_tree(given: Path | Mapping[str, object] | None, overrides: Iterable[str]) -> dict[str, object]:
    """Return the configuration as its driver reads it, with overrides applied and keys where the class has them, but
    with references as they are written. Malformed overrides are skipped: the driver reports them. Raises UsageFault,
    ManifestError."""
    import yaml

    tree = read_config(given) if isinstance(given, Path) else deepcopy(dict(given or {}))
    paths = []
    for text in overrides:
        with suppress(BadOverride, yaml.YAMLError, ValueError):  # 2024-13-01 is no date
            override = parse_override(str(text))
            apply_override(tree, override, yaml.safe_load(override.value or ""))
            paths.append(override.path)
    return lifted(tree, paths)


def choose_driver(given: str | None, tree: Mapping[str, object], where: str) -> str:
    """Return the driver as ``module:function``. ``tree``: from ``config_tree``. ``where`` names the configuration in
    errors. Raises UsageFault."""
    if named := given or tree.get("driver"):
        return str(named)
    trainer = tree.get("trainer")
    if not isinstance(trainer, Mapping) or "type" not in trainer:
        raise UsageFault(
            f"{where} names no driver",
            hint="--driver module:function, or in the configuration `driver:`, or `trainer: {type: grpo}`",
        )
    kind = "null" if trainer["type"] is None else str(trainer["type"])
    if kind not in BUILT_IN:
        guess = did_you_mean(kind, list(BUILT_IN))
        raise UsageFault(f"{where}: {_TYPE} {kind!r} has no built-in driver{guess}", hint=", ".join(BUILT_IN))
    return BUILT_IN[kind]


CONFIGS = ("BaseExperimentConfig", "GRPOConfig", "PPOConfig", "SFTConfig", "RWConfig", "DPOConfig")


def config_class(text: str, function: str) -> str | None:
    """Return the name of the configuration class in ``areal.api.cli_args`` that the driver ``function`` loads, or None
    if the source does not show it."""
    tree = ast.parse(text)
    ours = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "areal"
        for alias in node.names
    }

    def is_loading(node: ast.Call) -> bool:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return ours.get(name) == "load_expr_config" and len(node.args) == 2 and not node.keywords

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_loading(node)]
    driver = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if len(calls) != 1 or driver is None or calls[0] not in ast.walk(driver) or not driver.args.args:
        return None
    (words, cls), argument = calls[0].args, driver.args.args[0].arg
    used = [node for node in ast.walk(driver) if isinstance(node, ast.Name) and node.id == argument]
    if used != [words] or _is_called_with_more(tree, function):
        return None
    name = ours.get(cls.id) if isinstance(cls, ast.Name) else None
    return name if name in CONFIGS else None


def _is_called_with_more(tree: ast.Module, function: str) -> bool:
    """Return whether the script calls ``function`` with arguments other than its own command line."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return any(
        [ast.unparse(argument) for argument in call.args] not in (["sys.argv[1:]"], ["sys.argv"])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == function
    )


_OFFLINE = ("sft", "rw", "dpo")


class JobConfig:
    """A job's configuration, with its overrides. The driver checks it."""

    def __init__(self, job: Wanted, tree: dict[str, object]) -> None:
        self._job = job
        self._tree = tree

    @classmethod
    def of(cls, job: Wanted) -> JobConfig:
        """Read a job's configuration. Raises UsageFault, ManifestError. A missing file is reported when the driver
        starts."""
        given = job.spec.get("config")
        if isinstance(given, str):
            given = config_file(given, _folder(job), (job.source or {}).get("file"))
            job = replace(job, spec={**job.spec, "config": given and str(given)})
        return cls(job, config_tree(given, job.spec.get("overrides") or ()))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key as the driver gets it; ``default`` also for a reference that leads nowhere.
        Raises UsageFault if a value has references, and they cannot be read."""
        found = self._written(key)
        if _has_reference(found):
            found = get_path(self._values, tuple(key.split(".")))
        return default if found is ABSENT or (isinstance(found, str) and _has_reference(found)) else found

    @cached_property
    def _values(self) -> Mapping[str, object]:
        request = _reading(self._job)
        with suppress(UsageFault):  # no driver is named
            request = {**_request(self._job), "built_in": False}
        if (known := _known.get(_identity(request))) is not None:
            return known
        (answer,) = _ask([request])
        if answer["values"] is None:
            why = answer["faults"][0]["message"] if answer["faults"] else "its process cannot run here"
            raise UsageFault(f"{self._job.ref}: the configuration cannot be read: {why}", hint=install_command("train"))
        return dict(answer["values"])

    def _written(self, key: str) -> Any:
        return get_path(self._tree, tuple(key.split(".")))

    def text(self, key: str) -> str:
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def uses_images(self) -> bool:
        """Whether the workflow shows the images of a row to the model."""
        return self.text("workflow").replace(":", ".") == "areal.workflow.vision_rlvr.VisionRLVRWorkflow"

    def inference(self) -> Part | None:
        """Return the layout of the job's own inference engines, or None. Raises InvalidManifest."""
        online = isinstance(self.get("rollout"), Mapping) and self.get("trainer.type") not in _OFFLINE
        if not online or self.get("rollout.gateway_addr"):
            return None
        for key in ("rollout.backend", "allocation_mode"):
            if (layout := self._layout(key)) is not None:
                part = layout.inference
                return part if part is None or part.engine != "external" else None
        return None

    def training(self) -> tuple[str, Part] | None:
        """Return the key that lays out the training engine, and the layout, or None. Raises InvalidManifest."""
        for key in ("actor.backend", "model.backend", "allocation_mode"):
            layout = self._layout(key)
            if layout is not None and layout.training is not None:
                return key, layout.training
        return None

    def placement_of(self, part: str, scheduler: Mapping[str, object]) -> Placement:
        """Return the resources of the processes of ``training``, or of the job's own engines (``rollout``); their GPUs
        follow from their layout. Nothing is reserved on this machine. Raises InvalidManifest."""
        kind = str(scheduler.get("type", ""))
        if kind not in CLUSTERS:
            return Placement()
        trained = "model" if self.text("model.backend") and not self.text("actor.backend") else "actor"
        section = trained if part == "training" else part
        try:
            found = placement_of(self.get(f"{section}.scheduling_spec"), section, kind)
        except InvalidManifest as error:
            raise InvalidManifest(f"{self._job.ref}: {error.message}", hint=error.hint) from error
        own = found.resources if part == "training" else {k: v for k, v in found.resources.items() if k != "gpus"}
        return replace(found, resources=own)

    def _layout(self, key: str) -> Allocation | None:
        layout, written = self.text(key), self._written(key)
        if not layout:
            if isinstance(written, str) and written:
                message = f"{self._job.ref}: {key} {written!r} refers to a key that the configuration does not have"
                raise InvalidManifest(message, hint="write the value, or the key that it refers to")
            return None
        try:
            return parse_backend(layout)
        except BackendError as error:
            raise InvalidManifest(f"{self._job.ref}: {key} {layout!r}: {error}") from error

    def absolute(self, path: str) -> str:
        """Return a local path, made absolute from the working folder, or a hub id unchanged."""
        local = _folder(self._job) / Path(path).expanduser()
        return str(local) if local.exists() or looks_local(path) else path

    def engine_arguments(self, engine: str) -> dict[str, object]:
        """Return the configuration's section for the engine, without defaults and without arguments that areal sets."""
        section = self.get(engine)
        return engine_arguments(engine, section if isinstance(section, Mapping) else {}, self.text("actor.dtype"))


def _has_reference(value: object) -> bool:
    return "${" in str(value)


PROCESSES = "processesPerNode"
CLUSTERS = ("ray", "slurm")


def expand_job(job: Wanted, config: JobConfig) -> Wanted:
    """Return the job with its scheduler, nodes and processes taken from its configuration (``scheduler.type``,
    ``cluster.n_gpus_per_node``, the layout) where the spec does not set them. Raises InvalidManifest naming the
    field."""
    declared, resources = config.text("scheduler.type"), dict(job.spec.get("resources") or {})
    if declared not in ("", LOCAL) and not job.spec.get("scheduler"):
        job = replace(job, spec={**job.spec, "scheduler": {"type": declared}})
    scheduler, found = declared_backend(job.spec), config.training()
    per_node = config.get("cluster.n_gpus_per_node")
    if scheduler != LOCAL and found is not None and isinstance(per_node, int) and "nodes" not in resources:
        resources["nodes"] = max(1, -(-found[1].world_size // max(1, per_node)))
        job = replace(job, spec={**job.spec, "resources": resources})
    nodes = resources.get("nodes") or 1
    if nodes > 1 and scheduler == LOCAL:
        raise InvalidManifest(
            f"{job.ref}: spec.resources.nodes is {nodes}, and spec.scheduler.type local knows one machine",
            hint="leave nodes out, or scheduler: {type: slurm} or {type: ray}",
        )
    if found is None:
        return job
    key, part = found
    _require_possible(job, key, part)
    if resources.get(PROCESSES) is None:
        wanted, rest = divmod(part.world_size, nodes)
        if rest:
            raise InvalidManifest(
                f"{job.ref}: {key} {part} cannot be spread over spec.resources.nodes {nodes}: "
                f"{part.world_size} processes are no multiple of it",
                hint="each node has as many processes; another layout, or another number of nodes",
            )
        if wanted == 1:
            return job
        return replace(job, spec={**job.spec, "resources": {**resources, PROCESSES: wanted}})
    stated = nodes * resources[PROCESSES]
    if stated != part.world_size:
        raise InvalidManifest(
            f"{job.ref}: {key} {part} is {part.world_size} processes, and spec.resources.{PROCESSES} makes {stated}",
            hint="give one of them, or the same number",
        )
    return job


def _require_possible(job: Wanted, key: str, part: Part) -> None:
    if part.engine not in TRAIN_ENGINES:
        raise InvalidManifest(
            f"{job.ref}: {key} {part}: the {part.engine} engine is not there yet, and p, t, c and m need it",
            hint=f"for example fsdp:d{part.world_size}",
        )
    if part.engine == "fsdp" and (part.context > 1 or part.expert > 1):
        raise InvalidManifest(
            f"{job.ref}: {key} {part}: fsdp has data and tensor parallelism only",
            hint=f"for example fsdp:d{part.world_size}",
        )


_TRACKERS = {  # the setting, what turns the tracker off, its package
    "wandb": ("stats_logger.wandb.mode", "disabled"),
    "swanlab": ("stats_logger.swanlab.mode", "disabled"),
    "trackio": ("stats_logger.trackio.mode", "disabled"),
    "tensorboard": ("stats_logger.tensorboard.path", None),
}
_TRAINING = ("omegaconf", "numpy", "torch", "transformers", "safetensors")  # what every built-in driver imports


def require_runnable(job: Wanted, config: JobConfig) -> None:
    """Check that a job can run. Raises UsageFault, InvalidManifest."""
    if job.spec.get("suspend"):
        return
    scheduler = config.get("scheduler.type")
    if scheduler and scheduler not in BACKENDS:
        raise InvalidManifest(
            f"{job.ref}: no installed package registers the backend of scheduler.type {scheduler}; nothing was started",
            hint="scheduler.type=local runs it on this machine",
        )
    declared = declared_backend(job.spec)
    if scheduler and scheduler != declared:
        raise InvalidManifest(
            f"{job.ref}: scheduler.type is {scheduler}, and spec.scheduler.type is {declared}", hint="leave one out"
        )
    if declared != LOCAL and "shm" in (config.get("weight_update_mode"), config.get("actor.weight_update_mode")):
        raise InvalidManifest(
            f"{job.ref}: weight_update_mode shm is for a trainer and engines on one machine, and {declared} may place "
            "them on several",
            hint="actor.weight_update_mode=disk (a folder that all nodes see) or xccl (over the network)",
        )
    for package, (key, off) in _TRACKERS.items():
        if config.get(key) not in (None, off, "") and importlib.util.find_spec(package) is None:
            raise UsageFault(
                f"{job.ref}: {key} is {config.get(key)}, and the package {package} is not installed",
                hint=f"pip install {package}; metrics.jsonl is written in any case",
            )
    driver = job.spec.get("driver") or config.get("driver")
    if isinstance(driver, str):
        if (fault := import_fault(driver, import_places(job))) is not None:
            of_file = driver.partition(":")[0].endswith(".py")
            hint = None if of_file else f"looked in {_folder(job)}, PYTHONPATH and where packages are installed"
            raise UsageFault(f"{job.ref}: driver {driver!r}: {fault}", hint=hint)
        return
    places = import_places(job)
    for package in _TRAINING:
        if isinstance(module_of(package, places), str):
            raise UsageFault(f"{job.ref}: training needs the package {package}", hint=install_command("train"))
    key, part = config.training() or ("", None)
    if part is not None and part.engine == "megatron" and isinstance(module_of("megatron.core", places), str):
        raise UsageFault(f"{job.ref}: {key} {part} needs the package megatron-core", hint=install_command("megatron"))
    if config.uses_images() and isinstance(module_of("PIL", places), str):
        raise UsageFault(
            f"{job.ref}: its workflow sends images and needs the package pillow", hint=install_command("vision")
        )


def import_places(job: Wanted) -> list[str]:
    """Return the import path of the driver's process."""
    return import_path(_folder(job), job.spec.get("env") or {})


_LONGEST_S = 60.0


def job_faults(jobs: Iterable[tuple[Wanted, Resource]], report: StageReporter) -> dict[Ref, list[Diagnostic]]:
    """Return the faults of each job that has any. ``report`` is called before a job's slow check."""
    found: dict[Ref, list[Diagnostic]] = {}
    asked: list[tuple[Resource, dict[str, object]]] = []
    for job, resource in jobs:
        faults = found[resource.ref] = [*_missing_references(job, resource)]
        if faults:
            continue
        try:
            request = _request(job)
        except ManifestError as error:  # of the configuration's file
            faults += error.diagnostics
        except UsageFault as error:  # there is no driver
            faults.append(resource.fault(("config",), error.message, error.hint))
        else:
            if request["config"] is not None:
                report(job.ref, "checking its configuration")
                asked.append((resource, request))
    for (resource, request), answer in zip(asked, _ask([request for _, request in asked]), strict=True):
        found[resource.ref] += [_fault_diagnostic(resource, request, fault) for fault in answer["faults"]]
    return {ref: faults for ref, faults in found.items() if faults}


def class_faults(job: Wanted, resource: Resource) -> list[Diagnostic]:
    """Return the errors that the configuration's class reports. Names in the configuration are not resolved. Raises
    UsageFault, ManifestError."""
    if (request := _request(job))["config"] is None:
        return []
    [answer] = _ask([{**request, "built_in": False}])
    return [_fault_diagnostic(resource, request, fault) for fault in answer["faults"]]


def _missing_references(job: Wanted, resource: Resource) -> Iterator[Diagnostic]:
    """Yield missing folders, files and secrets."""
    spec, folder = job.spec, _folder(job)
    if not folder.is_dir():
        yield resource.fault(("workingDir",), f"there is no folder {str(folder)!r}")
    elif isinstance(spec.get("config"), str) and config_file(spec["config"], folder, None) is None:
        file = folder / spec["config"]
        near = sorted(each.name for each in file.parent.iterdir() if each.is_file()) if file.parent.is_dir() else []
        message = f"there is no file {spec['config']!r}{did_you_mean(file.name, near)}"
        yield resource.fault(("config",), message, looked_in(str(folder), resource.source.file))
    for path, message, hint in secret_faults(spec.get("envFrom") or {}):
        yield resource.fault(path, message, hint)


def _reading(job: Wanted) -> dict[str, object]:
    """Return the request to ``areal.training.checking`` for the values of a configuration. ``config``: the driver's
    class of it, None if it is not known."""
    spec, given = job.spec, job.spec.get("config")
    later = {"AREAL_AGENTS_ADDR": "later"} if (spec.get("rollout") or {}).get("agents") else {}  # not known yet
    return {
        "config": None,
        "file": str((_folder(job) / given).expanduser()) if isinstance(given, str) else "",
        "text": None if isinstance(given, str) else json.dumps(given or {}),
        "overrides": [str(each) for each in spec.get("overrides") or ()],
        "folder": str(_folder(job)),
        "env": {**(spec.get("env") or {}), **dict.fromkeys(spec.get("envFrom") or (), "secret"), **later},
        "built_in": False,
    }


def _request(job: Wanted) -> dict[str, object]:
    """Return the request to ``areal.training.checking`` for the faults of a configuration, too. Raises UsageFault,
    ManifestError."""
    request, spec = _reading(job), job.spec
    file = str(request["file"])
    tree = config_tree(Path(file) if file else spec.get("config"), spec.get("overrides") or ())
    driver = choose_driver(spec.get("driver"), tree, file or job.ref)
    if re.fullmatch(DRIVER, driver) is None:
        raise UsageFault(f"{driver!r} is not a driver", hint="module:function, or path/driver.py")
    dotted = driver.replace(":", ".")
    kind = next((kind for kind, known in BUILT_IN.items() if known.replace(":", ".") == dotted), None)
    return {
        **request,
        "config": DRIVERS[kind][1] if kind is not None else _config_of(job, driver),
        "built_in": kind is not None,
        "trains": kind != "null",
        "later": any(ref.startswith("TrainJob/") for ref in job.depends_on),
    }


def _config_of(job: Wanted, driver: str) -> str | None:
    """Return the configuration class of a user's own driver, if its source names it."""
    module, colon, function = driver.partition(":")
    if not colon and not module.endswith(".py"):
        module, function = driver.rpartition(".")[::2]
    found = module_of(module, import_places(job))
    if isinstance(found, str):
        return None
    file, rest = found[0], [*found[1], function or "main"]
    try:
        return config_class(file.read_text(encoding="utf-8"), rest[0]) if len(rest) == 1 else None
    except (OSError, SyntaxError, ValueError):  # reported elsewhere
        return None


_known: dict[str, dict[str, object]] = {}  # values of configurations that were read, by ``_identity``
_MOST_KNOWN = 64


def _identity(request: Mapping[str, object]) -> str:
    """Return what the values of a configuration depend on."""
    content = Path(str(request["file"])).read_text(encoding="utf-8") if request["file"] else request["text"]
    return json.dumps([content, *(request[each] for each in ("config", "overrides", "folder", "env"))])


def _ask(requests: Sequence[Mapping[str, object]]) -> list[Any]:
    """Return the ``faults`` and ``values`` of each request, all from one process; no faults, and None, if it cannot run
    (an extra is missing)."""
    if not requests:
        return []
    nothing: list[Any] = [{"faults": [], "values": None} for _ in requests]
    command = module_argv("areal.training.checking")
    try:
        done = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return nothing
    if done.returncode != 0:
        return nothing
    answers: list[Any] = json.loads(done.stdout)
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    for asked, answer in zip(requests, answers, strict=True):
        if answer["values"] is not None:
            _known[_identity(asked)] = answer["values"]
    return answers


def checked(config: str, content: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the faults of a built-in trainer's configuration, and the keys without effect. ``config``: its class."""
    request: dict[str, object] = {
        "config": config,
        "file": "",
        "text": json.dumps(content),
        "overrides": [],
        "folder": str(Path.cwd()),
    }
    request |= {"env": {}, "built_in": True, "trains": True, "later": True, "notes": True}
    (answer,) = _ask([request])
    return list(answer["faults"])


def _fault_diagnostic(resource: Resource, request: Mapping[str, Any], fault: Mapping[str, Any]) -> Diagnostic:
    path, message = tuple(fault["path"]), str(fault["message"])
    if fault["override"] is not None:
        at = ("overrides", request["overrides"].index(fault["override"]))
        return resource.fault(at, f"{path_text(path)}: {message}" if path else message)
    if request["file"]:
        line, column = fault["mark"] or (1, 1)
        return Diagnostic(Pos(request["file"], line, column), path_text(path), message)
    nested = (("trainer", kind, *path) for kind in TRAINERS)  # as AReaL-lite has it
    places = [path, *nested] if path else [path]
    place = next((each for each in places if get_path(resource.spec.get("config"), each) is not ABSENT), path)
    return resource.fault(("config", *place), message)
