"""Where a run keeps what it makes: config, logs of each attempt, metrics, trajectories, checkpoints, plots.

config.yaml          what the run was told, resolved
metrics.jsonl        a line a step
trajectories/        what was sampled, and why rollouts failed
version              the newest of the weights that were published
checkpoints/step_N   to resume from
models/step_N        to serve: Hugging Face folders
logs/attempt_N       and ``latest``
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig

_log = logging.getLogger(__name__)

FOLDER_VARIABLE = "AREAL_RUN_FOLDER"
ATTEMPT_VARIABLE = "AREAL_ATTEMPT"


@dataclass(frozen=True)
class RunFolder:
    root: Path
    attempt: int = 1

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"attempt_{self.attempt}"

    def prepare(self) -> None:
        """Raises UsageFault where the folder cannot be made."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageFault(
                f"the run's folder {self.root} cannot be made: {error}", hint="set cluster.fileroot"
            ) from error
        self._point_latest()

    def write_config(self, config: BaseExperimentConfig) -> None:
        """What this attempt trains with, every default in it; with ``--config`` it is the same run again."""
        aside = self.config.with_suffix(f".{os.getpid()}")
        aside.write_text(yaml.safe_dump(_written(config), sort_keys=False))
        aside.rename(self.config)

    def note_version(self, version: int) -> None:
        """This version of the weights is about to be published: no later attempt may give it to others."""
        aside = self._version.with_suffix(f".{os.getpid()}")
        aside.write_text(f"{version}\n")
        aside.rename(self._version)

    def published_version(self) -> int | None:
        """The last one that was noted."""
        try:
            return int(self._version.read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def _version(self) -> Path:
        return self.root / "version"

    def _point_latest(self) -> None:
        latest = self.root / "logs" / "latest"
        aside = latest.with_suffix(f".{os.getpid()}")
        aside.symlink_to(self.logs.name)
        aside.rename(latest)


def _written(value: Any) -> Any:
    """As YAML has it: a function or class by its name, a section that has two names by its first; secrets (fields that
    are not shown either) are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        first = {id(each): name for name, each in reversed(fields.items())}
        return {
            name: _written(each)
            for name, each in fields.items()
            if not dataclasses.is_dataclass(each) or first[id(each)] == name
        }
    if isinstance(value, Mapping):
        return {str(key): _written(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_written(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return f"{value.__module__}:{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)


def run_folder(config: BaseExperimentConfig) -> RunFolder:
    """The one that a TrainJob was given, else below ``cluster.fileroot``."""
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    if (given := os.environ.get(FOLDER_VARIABLE)) is not None:
        if config.cluster.fileroot:
            _log.warning("cluster.fileroot: has no effect in a job: it writes to %s", given)
        return RunFolder(Path(given), attempt)
    root = Path(config.cluster.fileroot).expanduser() / "runs" / config.experiment_name / config.trial_name
    return RunFolder(root.absolute(), attempt)
