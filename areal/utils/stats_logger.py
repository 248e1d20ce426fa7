"""AReaL's import path of ``StatsLogger``, for drivers that log their own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.cli_args import BaseExperimentConfig, ClusterSpecConfig, StatsLoggerConfig
from areal.training.metrics import MetricsLog, open_trackers
from areal.training.run_folder import run_folder


class StatsLogger:
    """Writes metrics to ``metrics.jsonl`` and the configured trackers, with or without a trainer, whose numbers of the
    same step stay. For rank 0 only."""

    def __init__(self, config: BaseExperimentConfig | StatsLoggerConfig, ft_spec: Any = None) -> None:
        experiment = _experiment(config)
        folder = run_folder(experiment)
        folder.prepare()
        self._log = MetricsLog(folder.metrics, folder.attempt, open_trackers(experiment, folder.root, resumes=True))

    def commit(
        self, epoch: int, step: int, global_step: int, data: Mapping[str, float] | Sequence[Mapping[str, float]]
    ) -> None:
        """Write the metrics of ``global_step``. ``epoch``, ``step`` (unused) and ``global_step`` count from 0."""
        parts = [data] if isinstance(data, Mapping) else data
        together = {name: float(value) for part in parts for name, value in part.items()}
        self._log.write(global_step + 1, {"epoch": float(epoch), **together})

    def close(self) -> None:
        self._log.close()

    @staticmethod
    def get_log_path(config: BaseExperimentConfig | StatsLoggerConfig) -> str:
        """Return an existing folder for other files of the driver."""
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
