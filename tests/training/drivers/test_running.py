"""A driver's process: what it runs, how it fails, how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal.installation import install_command
from areal.state.job_metrics import steps_of
from areal.training.checkpoints import Checkpoints
from tests.training.trainers.reversing import MODEL

REPOSITORY = Path(__file__).parents[3]
FOLDER = "runs/reversing/t"


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "areal.training", *words]


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*words), cwd=folder, env=_environment(), capture_output=True, text=True, timeout=200)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{n:04d}"}, {"role": "assistant", "content": f"{n:04d}"[::-1]}]}
        for n in range(1000, 1200)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"""\
experiment_name: reversing
trial_name: t
cluster: {{fileroot: {tmp_path}}}
total_train_steps: 4
train_dataset: {{path: {tmp_path}/rows.jsonl, batch_size: 16}}
recover: {{mode: auto, freq_steps: 2}}
model:
  path: {MODEL}
  dtype: float32
  optimizer: {{lr: 5.0e-4}}
"""
    )
    return path


def test_custom_driver_is_found_in_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef main(args):\n    print('got', args)\n    return 7\n")
    done = _run(tmp_path, "--driver", "mine:main", "--", "--config", "x.yaml", "~key", "+a.b=1")
    assert done.stdout == "got ['--config', 'x.yaml', '~key', '+a.b=1']\n"
    assert done.returncode == 7


def test_driver_logs_are_kept_and_client_calls_are_not(tmp_path: Path) -> None:
    names = ("mine", "httpx", "openai")
    lines = "".join(f"    logging.getLogger('{name}').info('from {name}')\n" for name in names)
    (tmp_path / "mine.py").write_text(f"import logging\ndef main(args):\n{lines}    return 0\n")
    logged = _run(tmp_path, "--driver", "mine:main").stderr
    assert [name for name in names if f"from {name}" in logged] == ["mine"]


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        ("nowhere:main", "nowhere"),
        ("json:nothing", "nothing"),
        ("broken:main", "ZeroDivisionError"),
        ("narrow:main", "cannot be called with one list of arguments"),
    ],
)
def test_unloadable_driver_is_one_line_error(tmp_path: Path, driver: str, says: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "narrow.py").write_text("def main():\n    pass\n")
    done = _run(tmp_path, "--driver", driver)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_package_is_named_with_install_and_final(tmp_path: Path) -> None:
    lacking = "import sys\ndef main(args):\n    sys.modules['omegaconf'] = None\n    import omegaconf.errors\n"
    (tmp_path / "lacking.py").write_text(lacking)
    done = _run(tmp_path, "--driver", "lacking:main")
    assert done.stderr == f"error: training needs the package omegaconf\nhint: {install_command('train')}\n"
    assert done.returncode == 2  # the status that a job's supervisor takes for final


def test_config_fault_gives_file_line_and_key_and_exits_3(tmp_path: Path, config: Path) -> None:
    config.write_text(config.read_text().replace("lr:", "lrr:"))
    done = _run(tmp_path, "--driver", "areal.training.drivers:sft", "--", "--config", str(config))
    assert done.returncode == 3
    assert "sft.yaml:10: model.optimizer.lrr" in done.stderr
    assert "lr" in done.stderr.split("did you mean")[1]


@pytest.mark.slow
def test_missing_dataset_exits_4(tmp_path: Path, config: Path) -> None:
    done = _run(
        tmp_path,
        "--driver",
        "areal.training.drivers:sft",
        "--",
        "--config",
        str(config),
        "train_dataset.path=./no.jsonl",
    )
    assert done.returncode == 4
    assert "no.jsonl" in done.stderr


@pytest.mark.extended
def test_sigterm_stops_run_and_restart_resumes_checkpoint(tmp_path: Path, config: Path) -> None:
    words = ["--driver", "areal.training.drivers:sft", "--", "--config", str(config), "total_train_steps=100000"]
    process = subprocess.Popen(_command(*words), cwd=tmp_path, env=_environment(), stderr=subprocess.PIPE, text=True)
    checkpoints = Checkpoints(tmp_path / FOLDER / "checkpoints")
    try:
        deadline = time.monotonic() + 200
        while checkpoints.newest() is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.endswith("stopped\n")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == steps_of(tmp_path / FOLDER / "metrics.jsonl")[-1]["step"], "nothing is done again"
    last = newest.step + 2
    done = _run(tmp_path, *words[:-1], f"total_train_steps={last}")
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {newest.step}" in done.stderr
    assert f"step {last}/{last}" in done.stderr
    assert steps_of(tmp_path / FOLDER / "metrics.jsonl")[-1]["step"] >= last


@pytest.mark.parametrize(
    ("returned", "status"), [("None", 0), ("3", 3), ("True", 1), ("256", 1), ("-1", 1), ("{'reward': 1}", 0)]
)
def test_exit_status_is_driver_return_value(tmp_path: Path, returned: str, status: int) -> None:
    (tmp_path / "driver.py").write_text(f"def main(argv):\n    return {returned}\n")
    done = _run(tmp_path, "--driver", "driver.py")
    assert done.returncode == status
    assert ("returned dict, which is no exit status" in done.stderr) == (returned[0] == "{")
