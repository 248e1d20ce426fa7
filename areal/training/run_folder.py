"""The folder of a run: configuration, logs of each attempt, metrics, trajectories, checkpoints, models.

config.yaml          the resolved configuration
metrics.jsonl        a line for each step; ``metrics.old.jsonl``: of an earlier run that this one did not resume
trajectories/        sampled trajectories and failures of rollouts
version              the newest published version of the weights
checkpoints/step_N   to resume from
models/step_N        Hugging Face folders to serve
logs/attempt_N       and ``latest``
lock                 held while a run by hand writes to the folder
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal.dataclasses import dataclass
from areal.errors import Locked, UsageFault
from areal.files import replace_file
from areal.hub import model_folder
from areal.resources.tree import ABSENT, changes, dotted

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig


_log = logging.getLogger(__name__)

FOLDER_VARIABLE = "AREAL_RUN_FOLDER"
ATTEMPT_VARIABLE = "AREAL_ATTEMPT"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json", ".gguf")


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
        """Create the folder. Raises UsageFault if that fails."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageFault(
                f"the run's folder {self.root} cannot be made: {error}", hint="set cluster.fileroot"
            ) from error
        latest = self.root / "logs" / "latest"
        partial = latest.with_suffix(f".{os.getpid()}")
        partial.symlink_to(self.logs.name)
        partial.rename(latest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other runs for the block. Raises Locked if another run writes to it. The folder of a
        job belongs only to this job."""
        if FOLDER_VARIABLE in os.environ:
            yield
            return
        with (self.root / "lock").open("a") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: child processes do not keep it
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):  # otherwise the file system has no locks
                    raise Locked(
                        f"another run of these names writes to {self.root}", hint="trial_name=ANOTHER, or end that run"
                    ) from error
            yield

    def write_config(self, config: BaseExperimentConfig) -> list[str]:
        """Write the configuration of this attempt with all defaults; as ``--config`` it starts the same run again.
        Return the differences from the previous attempt, as text. Keys that only one of the two has are left out."""
        text = yaml.safe_dump(plain_values(config), sort_keys=False)
        try:
            earlier = yaml.safe_load(self.config.read_text())
        except (OSError, ValueError, yaml.YAMLError):  # missing or damaged: nothing to compare with
            earlier = {}
        replace_file(self.config, text.encode())
        found = changes(earlier, yaml.safe_load(text)) if isinstance(earlier, dict) else ()
        return [f"{dotted(each.path)} {each.old} -> {each.new}" for each in found if ABSENT not in (each.old, each.new)]

    def note_version(self, version: int) -> None:
        """Reserve a version before it is published: no later attempt may use it for other weights."""
        replace_file(self._version, f"{version}\n".encode())

    def published_version(self) -> int | None:
        """Return the last recorded version."""
        try:
            return int(self._version.read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def _version(self) -> Path:
        return self.root / "version"


def plain_values(value: Any) -> Any:
    """Return the value as YAML types: functions and classes by name, a section with two names under its first. Secrets
    (fields with ``repr=False``) are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        first = {id(each): name for name, each in reversed(fields.items())}
        return {
            name: plain_values(each)
            for name, each in fields.items()
            if not dataclasses.is_dataclass(each) or first[id(each)] == name
        }
    if isinstance(value, Mapping):
        return {str(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return f"{value.__module__}:{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)


def run_folder(config: BaseExperimentConfig) -> RunFolder:
    """Return the TrainJob's folder; outside of a job, one below ``cluster.fileroot``."""
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    if (given := os.environ.get(FOLDER_VARIABLE)) is not None:
        if config.cluster.fileroot:
            _log.warning("cluster.fileroot: has no effect in a job: it writes to %s", given)
        return RunFolder(Path(given), attempt)
    root = Path(config.cluster.fileroot).expanduser() / "runs" / config.experiment_name / config.trial_name
    return RunFolder(root.absolute(), attempt)


def config_files(folder: Path) -> tuple[Path, ...]:
    """Return the configuration, tokenizer and chat template files of ``folder``."""
    return tuple(path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.endswith(_WEIGHTS))


def copy_missing(source: str, target: Path) -> None:
    """Copy the tokenizer of ``source`` (a folder or a hub id) to ``target`` without overwriting files."""
    for path in config_files(model_folder(source)):
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
