"""AReaL's ``scheduling_spec`` of a configuration, as fields of a manifest for a cluster. Pure.

Its one row applies to each process of its section (``actor``, ``model``, ``rollout``). Defaults are ignored, and fields
of the manifest take precedence. ``cmd``, ``task_type``, ``type`` and ``port_count`` belong to AReaL's own worker
program, which does not run here. A field that has no equivalent in a manifest is refused, with the field to write
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.dataclasses import dataclass, field
from areal.errors import InvalidManifest

_WORKERS_OWN = frozenset({"cmd", "task_type", "type", "port_count"})
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SLURM_ONLY = {
    "image": "runtimeEnv: {image_uri: ...}",
    "container_type": "runtimeEnv: {image_uri: ...}",
    "mount": "runtimeEnv: {image_uri: ...}",
    "additional_bash_cmds": "runtimeEnv",
    "nodelist": "resources: {'node:ADDRESS': 0.001}",
    "exclude": "resources, of a custom resource that those nodes lack",
    "exclusive": "resources, of all that a node has",
}


@dataclass(frozen=True)
class Placement:
    """Placement of one process: ``resources``, ``env`` and scheduler settings, in the form of a spec."""

    resources: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


def placement_of(rows: object, where: str, scheduler: str) -> Placement:
    """Return the placement of a section's processes. ``where``: the section, such as ``actor``. Raises InvalidManifest
    with the path of an unsupported field."""
    where = f"{where}.scheduling_spec"
    if not rows:
        return Placement()
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], Mapping):
        raise _refused(where, "is not a list of one row: all processes of a section are placed alike", "one row")
    row = {name: value for name, value in rows[0].items() if value or (name == "gpu" and value == 0)}
    settings = (_for_slurm if scheduler == "slurm" else _for_ray)(row, f"{where}.0")
    resources: dict[str, object] = {}
    if "cpu" in row:
        resources["cpus"] = row["cpu"]
    if "mem" in row:
        resources["memory"] = f"{row['mem']}Gi"
    if "gpu" in row:
        resources["gpus"] = row["gpu"]
    env = row.get("env_vars") or {}
    known = {"cpu", "mem", "gpu", "env_vars", "srun_additional_args", "ray_placement_strategy", *_SLURM_ONLY}
    if unknown := sorted(row.keys() - known - _WORKERS_OWN):
        raise _refused(f"{where}.0.{unknown[0]}", "is no field of a scheduling_spec", "leave it out")
    return Placement(resources, {str(name): str(value) for name, value in env.items()}, settings)


def _for_slurm(row: Mapping[str, object], where: str) -> dict[str, object]:
    if "srun_additional_args" in row:
        why = "is of srun, and jobs are submitted by sbatch"
        raise _refused(f"{where}.srun_additional_args", why, "spec.scheduler.slurm.extraArgs, in sbatch's words")
    if row.get("container_type") not in (None, "pyxis", "apptainer"):
        raise _refused(f"{where}.container_type", f"{row['container_type']!r} is unknown", "pyxis or apptainer")
    made = {
        "nodelist": row.get("nodelist"),
        "exclude": row.get("exclude"),
        "extraArgs": ["--exclusive"] if row.get("exclusive") else None,
        "setupCommands": row.get("additional_bash_cmds"),
        "containerImage": row.get("image"),
        "containerType": row.get("container_type"),
        "containerMounts": str(row["mount"]).split(",") if "mount" in row else None,
    }
    return {name: value for name, value in made.items() if value is not None}


def _for_ray(row: Mapping[str, object], where: str) -> dict[str, object]:
    for name, instead in _SLURM_ONLY.items():
        if name in row:
            raise _refused(f"{where}.{name}", "is of Slurm, and the scheduler is ray", f"spec.scheduler.ray.{instead}")
    strategy = row.get("ray_placement_strategy", "shared")  # AReaL's default: of processes that share a bundle
    if strategy in _STRATEGIES:
        return {"placementStrategy": strategy}
    if strategy != "shared":
        why = f"{strategy!r} has no meaning here: each process is a job of its own"
        raise _refused(f"{where}.ray_placement_strategy", why, f"one of {', '.join(_STRATEGIES)}, or leave it out")
    return {}


def _refused(path: str, why: str, instead: str) -> InvalidManifest:
    return InvalidManifest(f"{path} {why}", hint=f"write {instead}")


def with_placement(spec: Mapping[str, Any], placement: Placement) -> dict[str, object]:
    """Return ``spec`` with the placement's values as defaults."""
    found = dict(spec)
    for name, values in (("resources", placement.resources), ("env", placement.env)):
        if values:
            found[name] = {**values, **(spec.get(name) or {})}
    if placement.settings:
        scheduler = dict(spec.get("scheduler") or {})
        kind = str(scheduler["type"])
        found["scheduler"] = {**scheduler, kind: {**placement.settings, **(scheduler.get(kind) or {})}}
    return found
