"""Where processes run, as AReaL's drivers say it. Manifests say it here: these fields are read, not acted upon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from areal.api.config.marks import PLACEMENT, Inert
from areal.resources.backend_grammar import Allocation, Part, parse_backend


def parsed(text: str, name: str, **how: Any) -> Allocation:
    """The allocation that ``name`` says. Raises ValueError naming it and the column."""
    try:
        return parse_backend(text, **how)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_training(part: Part, name: str) -> None:
    """Raises ValueError for a layout that no engine here has."""
    if part.engine != "fsdp":
        raise ValueError(f"{name}: the {part.engine} engine is not there yet: use fsdp")
    if part.devices_per_replica > 1 or part.expert > 1:
        raise ValueError(
            f"{name}: {part} is not there yet: fsdp shards over data-parallel ranks only, for example fsdp:d4"
        )


@dataclass
class SchedulingSpec:
    cpu: int = 8
    gpu: int = 0
    mem: int = 32
    port_count: int = 2
    task_type: str = "worker"
    image: str | None = None
    type: str = ""
    cmd: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    additional_bash_cmds: list[str] | None = None
    container_type: str = ""
    mount: str | None = None
    srun_additional_args: str = ""
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    ray_placement_strategy: str = ""


@dataclass
class SchedulingStrategy:
    type: Literal["separation", "colocation"] = "separation"
    target: str | None = None
    fork: bool = True


@dataclass
class SchedulerConfig:
    type: Literal["local", "ray", "slurm"] | None = None
    endpoint: str = ""
    deploy_mode: str = ""
    functioncall_service_domain: str = ""
    reward_functioncall_config: dict[str, Any] = field(default_factory=dict)
    reward_model_path: str = ""
    reward_model_service_url: str = ""


@dataclass
class NameResolveConfig:
    type: Literal["nfs", "etcd3", "ray"] = "nfs"
    nfs_record_root: str = "/tmp/areal/name_resolve"
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = ""


@dataclass
class ClusterSpecConfig:
    """``fileroot``: the folder below which runs write. Empty: the job's own folder."""

    fileroot: str = ""
    n_nodes: Annotated[int, PLACEMENT] = 32
    n_gpus_per_node: Annotated[int, PLACEMENT] = 8
    cluster_name: Annotated[str, PLACEMENT] = "local"
    name_resolve: Annotated[NameResolveConfig, Inert("services are found in recorded state, not by a name store")] = (
        field(default_factory=NameResolveConfig)
    )
