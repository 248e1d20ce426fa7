"""What a trainer tells Prometheus, and where Prometheus finds it."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import (
    PrometheusConfig,
    SFTConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.client.command import free_port
from areal.client.prometheus import parse
from areal.errors import UsageFault
from areal.training.metrics import prometheus
from areal.training.trainers.offline import SFTTrainer
from tests.services.test_metrics import check_documented
from tests.training.trainers.reversing import engine, experiment, solved

NUMBERS = {
    **dict.fromkeys(("reward/mean", "eval/reward/mean", "accuracy", "loss", "grad_norm", "lr", "entropy"), 0.5),
    **dict.fromkeys(("approx_kl", "ref_kl", "mismatch_kl", "staleness/mean", "staleness/max"), 0.25),
    **dict.fromkeys(("length/mean", "length/truncated", "tokens_per_second", "version", "prompts/consumed"), 3.0),
    "tokens": 100.0,
    "time/rollout": 1.0,
    "time/step": 2.0,
    "rollout/own": math.nan,
}


def _config(**asked: object) -> SFTConfig:
    logger = StatsLoggerConfig(prometheus=PrometheusConfig(**asked))  # type: ignore[arg-type]
    return SFTConfig(experiment_name="e", trial_name="t", stats_logger=logger)


def scrape(url: str, key: str = "") -> str:
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def test_trainer_metrics_match_docs_and_are_discoverable(tmp_path: Path) -> None:
    with prometheus(_config(), tmp_path, total_steps=7) as (tracker, url):
        (found,) = json.loads((tmp_path / "prometheus.json").read_text())
        assert f"http://{found['targets'][0]}" == url
        assert found["labels"] == {"job": "areal-trainer", "experiment": "e", "trial": "t"}
        tracker.log(4, NUMBERS)
        tracker.log(5, NUMBERS)
        text = scrape(url)
    assert not (tmp_path / "prometheus.json").exists()
    check_documented(text, "trainer")
    metrics = parse(text)
    assert metrics.total("areal_trainer_step") == 5 and metrics.total("areal_trainer_total_steps") == 7
    assert metrics.total("areal_trainer_reward") == 0.5
    assert metrics.total("areal_trainer_kl_nats", lambda labels: labels["kind"] == "reference") == 0.25
    assert metrics.total("areal_trainer_staleness_versions", lambda labels: labels["statistic"] == "max") == 0.25
    assert metrics.total("areal_trainer_tokens_total") == 200  # of both steps: rate() is the throughput
    assert metrics.total("areal_trainer_seconds_total", lambda labels: labels["phase"] == "rollout") == 2


def test_public_trainer_metrics_require_key(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="without an admin key"), prometheus(_config(host="0.0.0.0"), tmp_path, 1):
        pass
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 32)
    with prometheus(_config(host="0.0.0.0", key_file=str(key)), tmp_path, 1) as (_, url):
        assert parse(scrape(url, "k" * 32)).total("areal_trainer_total_steps") == 1
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(url)
        assert refused.value.code == 401


def test_configured_port_is_used(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": TrainEngineConfig(**engine()), "train_dataset": TrainDatasetConfig(batch_size=4)}
    for asked in (PrometheusConfig(port=free_port()), PrometheusConfig(enabled=False)):
        config = SFTConfig(**experiment(tmp_path), **given, stats_logger=StatsLoggerConfig(prometheus=asked))
        with SFTTrainer(config, solved(8)) as trainer:
            assert trainer.metrics_url == (f"http://127.0.0.1:{asked.port}" if asked.enabled else None)
            assert (trainer.folder.root / "prometheus.json").exists() == asked.enabled
