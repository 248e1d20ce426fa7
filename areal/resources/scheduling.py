"""``spec.scheduler``: the backend of an object's processes and the settings of a cluster."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from areal.resources.fields import EXPRESSION, PositiveSeconds, Schema, SpecModel, Text, given, when, written
from areal.resources.kinds import BACKENDS
from areal.resources.tree import UpdateClass

_RAY_OWN = ("CPU", "GPU", "memory", "object_store_memory")


class Ray(SpecModel):
    """A Ray cluster, and the options of jobs on it."""

    address: Annotated[Text, UpdateClass.RECREATE] = "auto"
    """URL of the cluster's dashboard, for example `http://head:8265`. `auto`: `$RAY_API_SERVER_ADDRESS`, else
    `$RAY_ADDRESS` if it is a URL, else `http://127.0.0.1:8265`."""
    namespace: Annotated[Text, UpdateClass.RECREATE] = "areal"
    """Ray namespace of the actors of a process that runs on several nodes."""
    runtime_env: Annotated[dict[str, JsonValue], UpdateClass.RECREATE] = {}
    """Ray's runtime environment of each process, passed on unchanged: `env_vars`, `pip`, `image_uri`."""
    working_dir: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Folder that is copied to the nodes and in which processes start, or the URI of an archive. Absent: the folder of
    the command, which every node must have."""
    python: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Python on the nodes with areal installed. Absent: that of the command, or `python` if `runtimeEnv` brings one."""
    resources: Annotated[dict[str, Annotated[float, Field(ge=0)]], UpdateClass.RECREATE] = {}
    """Custom resources that each process needs on its node, for example `{h100: 1}`."""
    placement_strategy: Annotated[Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"], UpdateClass.RECREATE] = (
        "STRICT_SPREAD"
    )
    """Placement group of a process that runs on several nodes."""
    autoscaling: Annotated[bool, UpdateClass.RECREATE] = False
    """`true`: the cluster adds nodes, so a process that fits on no present node waits for one. `false`: such a process
    is refused before anything starts."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        texts: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
        variables: Schema = {"properties": {"env_vars": {"anyOf": [texts, {"type": "null"}, EXPRESSION]}}}
        custom: Schema = {"propertyNames": {"not": {"enum": list(_RAY_OWN)}}}
        return [{"properties": {"runtimeEnv": variables, "resources": custom}}]

    @field_validator("resources")
    @classmethod
    def _custom_only(cls, resources: dict[str, float]) -> dict[str, float]:
        if own := next((name for name in _RAY_OWN if name in resources), None):
            raise PydanticCustomError(
                "areal_ray_resources",
                "{own} is no custom resource: spec.resources says CPUs and memory, the backend says GPUs",
                {"own": own},
            )
        return resources

    @field_validator("runtime_env")
    @classmethod
    def _variables_are_texts(cls, environment: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Refuse other values than strings here: Ray reports them only after the job has been submitted."""
        variables = environment.get("env_vars")
        if variables is not None and not (
            isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
        ):
            raise PydanticCustomError("areal_ray_variables", "env_vars is a map of texts: put its values into quotes")
        return environment


_OWN_OPTIONS = (
    *("--array", "--chdir", "--clusters", "--comment", "--job-name", "--output", "--parsable", "--test-only"),
    *("--wait", "--wrap"),
)
_OWN_LETTERS = ("-J", "-D", "-M", "-W", "-a", "-o")


class Slurm(SpecModel):
    """Options of Slurm submissions."""

    partition: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Partition to submit to. Absent: the cluster's default."""
    account: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Account to charge. Absent: the user's default."""
    qos: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Quality of service. Absent: the account's default."""
    nodelist: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Nodes that a job must have, as Slurm writes them: `n[1-4]`."""
    exclude: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Nodes that a job must not have."""
    constraint: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Features that a node must have, for example `h100&ib`."""
    time_limit_seconds: Annotated[PositiveSeconds | None, UpdateClass.RECREATE] = None
    """Wall-clock limit of a job. Absent: the partition's."""
    extra_args: Annotated[list[Text], UpdateClass.RECREATE] = []
    """Options passed to `sbatch` unchanged, after areal's own, for example `--exclusive`. Not allowed are `--array`,
    because each process is one job, and options by which areal finds its jobs."""
    setup_commands: Annotated[list[Text], UpdateClass.RECREATE] = []
    """Shell commands at the start of the job's script, for example `module load cuda`."""
    container_image: Annotated[Text | None, UpdateClass.RECREATE] = None
    """Image in which the processes run; its `python3` must have areal installed. Absent: processes run on the node
    itself."""
    container_type: Annotated[Literal["pyxis", "apptainer"], UpdateClass.RECREATE] = "pyxis"
    """`pyxis`: with `srun --container-image`. `apptainer`: with `apptainer exec`."""
    container_mounts: Annotated[list[Text], UpdateClass.RECREATE] = []
    """Further folders of the node in the container, `SOURCE:TARGET`; `$AREAL_HOME` is always there."""

    @field_validator("extra_args")
    @classmethod
    def _no_reserved_options(cls, words: list[str]) -> list[str]:
        for word in words:
            if word == ":":
                raise PydanticCustomError(
                    "areal_sbatch_option", '":" begins a second part of the job, and each process is one job'
                )
            option = word.partition("=")[0]
            long = len(option) > 2 and option.startswith("--") and any(own.startswith(option) for own in _OWN_OPTIONS)
            if long or (not option.startswith("--") and option[:2] in _OWN_LETTERS):
                raise PydanticCustomError(
                    "areal_sbatch_option",
                    "{option} is areal's own: each process is one job, which is found by its name and comment",
                    {"option": option},
                )
        return words

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        apptainer, mounted = (
            written("containerType", {"const": "apptainer"}),
            written("containerMounts", {"minItems": 1}),
        )
        return [when({"anyOf": [apptainer, mounted]}, given("containerImage"))]

    @model_validator(mode="after")
    def _container_has_an_image(self) -> Self:
        if self.container_image is None and (self.container_type != "pyxis" or self.container_mounts):
            field = "containerMounts" if self.container_mounts else "containerType"
            raise PydanticCustomError(
                "areal_container", "{field} has no effect without containerImage", {"field": field}
            )
        return self


def _registered(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept the name of a backend that a package has registered."""
    return value if isinstance(value, str) and value in BACKENDS else validate(value)


class Scheduler(SpecModel):
    """Backend of processes."""

    type: Annotated[
        Literal["local", "ray", "slurm"], WrapValidator(_registered), PlainSerializer(str), UpdateClass.IMMUTABLE
    ] = "local"
    """`local`: this machine. `ray`, `slurm`: a cluster. Packages can add others."""
    ray: Annotated[Ray | None, UpdateClass.RECREATE] = None
    """Settings for `type: ray`."""
    slurm: Annotated[Slurm | None, UpdateClass.RECREATE] = None
    """Settings for `type: slurm`."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        of_type = {kind: {"anyOf": [{"const": kind}, EXPRESSION]} for kind in ("ray", "slurm")}
        return [
            when(written(kind), {"required": ["type"], "properties": {"type": shape}})
            for kind, shape in of_type.items()
        ]

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        for kind, settings in (("ray", self.ray), ("slurm", self.slurm)):
            if settings is not None and self.type != kind:
                raise PydanticCustomError(
                    "areal_scheduler",
                    '"{kind}" settings need "type: {kind}", the type is {type}',
                    {"kind": kind, "type": self.type},
                )
        return self
