"""AReaL's import path of what writes a run's numbers down: for drivers that log some of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.cli_args import BaseExperimentConfig, ClusterSpecConfig, StatsLoggerConfig
from areal.training.metrics import MetricsLog, open_trackers
from areal.training.run_folder import run_folder


class StatsLogger:
    """Lines of ``metrics.jsonl`` and of whatever trackers the configuration asks for, beside a trainer or without one.
    The first rank makes one."""

    def __init__(self, config: BaseExperimentConfig | StatsLoggerConfig, ft_spec: Any = None) -> None:
        experiment = _experiment(config)
        folder = run_folder(experiment)
        folder.prepare()
        self._log = MetricsLog(folder.metrics, folder.attempt, open_trackers(experiment, folder.root))

    def commit(
        self, epoch: int, step: int, global_step: int, data: Mapping[str, float] | Sequence[Mapping[str, float]]
    ) -> None:
        """``step`` is of the epoch; the line is that of ``global_step``. All from 0, as a loop counts."""
        parts = [data] if isinstance(data, Mapping) else data
        together = {name: float(value) for part in parts for name, value in part.items()}
        self._log.write(global_step + 1, {"epoch": float(epoch), **together})

    def close(self) -> None:
        self._log.close()

    @staticmethod
    def get_log_path(config: BaseExperimentConfig | StatsLoggerConfig) -> str:
        """A folder for whatever else a driver writes; it is there."""
        folder = run_folder(_experiment(config))
        folder.prepare()
        return str(folder.logs)


def _experiment(config: BaseExperimentConfig | StatsLoggerConfig) -> BaseExperimentConfig:
    if isinstance(config, BaseExperimentConfig):
        return config
    return BaseExperimentConfig(
        experiment_name=config.experiment_name,
        trial_name=config.trial_name,
        cluster=ClusterSpecConfig(fileroot=config.fileroot),
        stats_logger=config,
    )
