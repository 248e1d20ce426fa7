"""The spec of a TrainJob."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from areal.resources.fields import (
    Backoff,
    Cores,
    Count,
    PositiveCount,
    Quantity,
    RolloutRef,
    Schema,
    Seconds,
    SecretFrom,
    SpecModel,
    Text,
    Variable,
    given,
    worded,
)
from areal.resources.scheduling import Scheduler
from areal.resources.tree import TRAINERS, FieldPath, UpdateClass

_FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
DRIVER = worded(
    rf"^(?:[^\s:]+\.py(?::{_FUNCTION})?|{_FUNCTION}[:.]{_FUNCTION})$", 'look like "module:function" or "path/driver.py"'
)
DRIVERS = {kind: (f"areal.training.drivers:{kind}", f"{kind.upper()}Config") for kind in TRAINERS}
DRIVERS["null"] = ("areal.training.drivers:evaluate", "PPOConfig")
"""The built-in drivers by ``trainer.type``, each with the class of its configuration."""


class JobResources(SpecModel):
    """Resources of the job's training processes."""

    gpus: Annotated[Count | None, UpdateClass.IMMUTABLE] = None
    """GPUs of each process. Absent: 1 where the machine has GPUs, else 0."""
    cpus: Annotated[Cores | None, UpdateClass.IMMUTABLE] = None
    """CPU cores that a cluster scheduler reserves for each process; `local` reserves none. Absent: the scheduler's
    default."""
    memory: Annotated[Quantity | None, UpdateClass.IMMUTABLE] = None
    """Main memory that a cluster scheduler reserves for each process, for example `64Gi`. Absent: the scheduler's
    default."""
    nodes: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Number of machines."""
    processes_per_node: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Training processes on each machine."""


class JobRestart(SpecModel):
    """Restart after the driver fails. A restarted job resumes from its newest checkpoint."""

    policy: Annotated[Literal["OnFailure", "Never"], UpdateClass.RECREATE] = "OnFailure"
    """`OnFailure`: start again. `Never`: the first failure is final."""
    max_restarts: Annotated[Count, UpdateClass.RECREATE] = 3
    """Restarts before the job is `Failed`."""
    backoff: Annotated[Backoff, UpdateClass.RECREATE] = Backoff.model_construct()
    """Pauses between restarts."""


_EXAMPLE_CONFIG = """\
# Answers are sampled, scored by my_reward.py, and learned from: GRPO. Paths are relative to the job's working folder.
experiment_name: my-job
trial_name: first
total_train_steps: 100
tokenizer_path: ${actor.path}
trainer: {type: grpo}
train_dataset: {path: questions.jsonl, batch_size: 4}
reward_fn: my_reward:reward
gconfig: {n_samples: 4, max_new_tokens: 64}
rollout:
  backend: embedded:d1  # of a service of the job's own, gone at its end; on a GPU: sglang:d1 or vllm:d1
actor:
  path: Qwen/Qwen3-0.6B
  backend: fsdp:d1
  optimizer: {lr: 1.0e-6}
  kl_ctl: 0.0
"""
_EXAMPLE_REWARD = '''"""What an answer is worth."""


def reward(prompt, completions, prompt_ids, completion_ids, **data):
    """1 for an answer that ends with the right number. ``data``: the row of the data set."""
    return float(completions.strip().rstrip(".").endswith(data["answer"]))
'''
_EXAMPLE_QUESTIONS = "".join(
    f'{{"messages": [{{"role": "user", "content": "{a} + {b} = ?"}}], "answer": "{a + b}"}}\n'
    for a in range(2, 6)
    for b in range(11, 15)
)


class TrainJobSpec(SpecModel):
    """A training run: a driver, its configuration, and the models it samples from."""

    REPLACEABLE: ClassVar = True
    REFERENCES: ClassVar = (
        (("rollout",), "service", "InferenceService"),
        (("rollout",), "model", "Model"),
        (("rollout",), "agents", "AgentService"),
    )
    INSTEAD: ClassVar = {("rollout", "service"): "agents"}
    FILES: ClassVar = (("workingDir",), ("envFrom", "*", "file"), ("config",))
    FILES_FROM: ClassVar = {"config": "workingDir"}
    EXAMPLE: ClassVar = ("my-job", {"config": "config.yaml"})
    EXAMPLE_FILES: ClassVar = {
        "config.yaml": _EXAMPLE_CONFIG,
        "my_reward.py": _EXAMPLE_REWARD,
        "questions.jsonl": _EXAMPLE_QUESTIONS,
    }

    driver: Annotated[str | None, Field(pattern=DRIVER), UpdateClass.IMMUTABLE] = None
    """The driver, as `module:function` or as a script, `path/driver.py`. Absent: `driver:` of the configuration, else
    the built-in driver of its trainer type."""
    config: Annotated[Text | dict[str, JsonValue] | None, UpdateClass.IMMUTABLE] = None
    """The driver's configuration: a file, or an inline map."""
    overrides: Annotated[list[Text], UpdateClass.IMMUTABLE] = []
    """Overrides of the configuration, as `key=value`, passed to the driver unchanged."""
    rollout: Annotated[RolloutRef | None, UpdateClass.IMMUTABLE] = None
    """The model that the job samples from and updates, or the agents that use it. Absent: the job starts and owns its
    own service if its configuration describes an inference engine (`rollout.backend`, `allocation_mode`)."""
    scheduler: Annotated[Scheduler, UpdateClass.IMMUTABLE] = Scheduler.model_construct()
    """Backend of the processes."""
    resources: Annotated[JobResources, UpdateClass.IMMUTABLE] = JobResources.model_construct()
    """Resources of the training processes."""
    env: Annotated[dict[Variable, str], UpdateClass.IMMUTABLE] = {}
    """Environment variables of the driver. Quote numbers, because every value is a string."""
    env_from: Annotated[dict[Variable, SecretFrom], UpdateClass.IMMUTABLE] = {}
    """Environment variables of the driver with secret values, which areal does not record: `WANDB_API_KEY: {env:
    WANDB_API_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.IMMUTABLE] = None
    """Folder in which the driver starts; it is also on its import path. Absent: the folder where the job was first
    applied."""
    restart: Annotated[JobRestart, UpdateClass.RECREATE] = JobRestart.model_construct()
    """Restart after the driver fails."""
    ttl_seconds_after_finished: Annotated[Seconds | None, UpdateClass.HOT] = None
    """Time after which the next `areal reconcile` deletes a finished job. Absent: it stays until you delete it."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the job resumes from its newest checkpoint."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        overrides: Schema = {"required": ["overrides"], "properties": {"overrides": {"not": {"enum": [[]]}}}}
        return [{"anyOf": [given("driver"), given("config"), overrides]}]

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.driver is None and self.config is None and not self.overrides:
            yield (), 'one of "driver", "config" and "overrides" is needed'
