"""A driver runs in as many processes as its configuration lays out, however it is started, or is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from areal.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from areal.errors import ArealError, UsageFault
from areal.resources.backend import Part
from areal.training.__main__ import load_driver
from areal.training.ranks import Ranks, ensure_layout, join_ranks, processes_of, require_layout

REPOSITORY = Path(__file__).parents[2]
DRIVER = """
import os, sys
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.training.ranks import ensure_layout

def main(args):
    config, _ = load_expr_config(args, SFTConfig)
    ensure_layout(config)
    with open("ran", "a") as file:
        file.write(f"{os.environ.get('RANK', 0)} of {os.environ.get('WORLD_SIZE', 1)}\\n")

if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def ran(cwd: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}
    environment = {name: value for name, value in environment.items() if name != "AREAL_RUN_FOLDER"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


NAMES = ("experiment_name=e", "trial_name=t")


@pytest.mark.extended
def test_plain_driver_starts_configured_number_of_ranks(tmp_path: Path, driver: Path) -> None:
    done = ran(tmp_path, "driver.py", *NAMES, "model.backend=fsdp:d2")
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "ran").read_text().split("\n")) == ["", "0 of 2", "1 of 2"]


@pytest.mark.extended
def test_single_process_driver_runs_in_place(tmp_path: Path, driver: Path) -> None:
    done = ran(tmp_path, "driver.py", *NAMES, "allocation_mode=embedded:d1+fsdp:d1")
    assert (done.returncode, (tmp_path / "ran").read_text()) == (0, "0 of 1\n"), done.stderr


@pytest.mark.extended
def test_wrong_process_count_is_refused(tmp_path: Path, driver: Path) -> None:
    started = ("-m", "areal.training.launch", "--processes", "2", "--", "--driver", "driver.py", "--")
    done = ran(tmp_path, *started, *NAMES, "model.backend=fsdp:d3")
    assert done.returncode == 2, done.stderr
    assert "lays out 3 training processes, and 2 were started" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_process_that_cannot_relaunch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = load_expr_config([*NAMES, "actor.backend=fsdp:d4"], GRPOConfig)
    with pytest.raises(UsageFault, match="lays out 4 training processes, and 1 was started") as caught:
        ensure_layout(config)
    assert "areal train run" in str(caught.value.hint)
    monkeypatch.setenv("AREAL_RUN_FOLDER", "/somewhere")  # a job has what its manifest says
    ensure_layout(config)


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ((), None),
        (("actor.backend=fsdp:d2",), 2),
        (("allocation_mode=sglang:d4+fsdp:d3",), 3),
        (("allocation_mode=sglang:d4+fsdp:d3", "actor.backend=fsdp:d2"), 2),
        (("allocation_mode=sglang.d16p1m1+d8p1m1",), 8),
    ],
)
def test_process_count_is_of_training_engine(words: tuple[str, ...], processes: int | None) -> None:
    assert processes_of(load_expr_config([*NAMES, *words], GRPOConfig)[0]) == processes
    words = tuple(word.replace("actor.", "model.") for word in words)
    assert processes_of(load_expr_config([*NAMES, *words], SFTConfig)[0]) == processes


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def main(args):\n    print('main', args)\n", "", "main ['a=1']"),
        ("def other(args):\n    print('other', args)\n", ":other", "other ['a=1']"),
        ("import sys\nprint('script', sys.argv[1:], __name__)\n", "", "script ['a=1'] __main__"),
        (
            "import sys\ndef main(word):\n    print('own', word)\nif __name__ == '__main__':\n    main(sys.argv[1])\n",
            "",
            "own a=1",
        ),
    ],
)
def test_driver_may_be_a_file(tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "drive_it.py").write_text(text)
    done = ran(tmp_path, "-m", "areal.training", "--driver", f"sub/drive_it.py{name}", "--", "a=1")
    assert (done.returncode, done.stdout.strip()) == (0, message), done.stderr


@pytest.mark.parametrize(
    ("path", "message"), [("nothing.py", "there is no driver"), ("os.getcwd", "cannot be called with one list")]
)
def test_invalid_driver_is_refused(path: str, message: str) -> None:
    with pytest.raises(ArealError, match=message):
        load_driver(path)


@pytest.mark.extended
def test_launcher_of_areal_is_train_run(tmp_path: Path, driver: Path) -> None:
    words = ("-m", "areal.infra.launcher.local", "driver.py", *NAMES, "allocation_mode=embedded:d1+fsdp:d1")
    (tmp_path / "config.yaml").write_text("")
    home = str(tmp_path / "home")
    done = ran(tmp_path, *words, AREAL_HOME=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "0 of 1\n"
    assert ran(tmp_path, "-m", "areal.infra.launcher.local").returncode == 2
    missing = ran(tmp_path, "-m", "areal.cli.main", "train", "run", "--driver", "no.py", *NAMES, AREAL_HOME=home)
    assert missing.returncode == 2 and "there is no driver no.py" in missing.stderr


def ranks_of(layout: Part, size: int | None = None) -> list[Ranks]:
    size = size or layout.world_size
    return [Ranks(rank, size, torch.device("cpu"), layout=layout) for rank in range(size)]


def test_ranks_of_replica_share_data_parallel_rank() -> None:
    alone = ranks_of(Part("fsdp", 4))
    assert [(each.data_rank, each.data_size, each.is_replica_first) for each in alone] == [
        (rank, 4, True) for rank in range(4)
    ]
    tensor = ranks_of(Part("fsdp", data=2, tensor=2))
    assert [each.data_rank for each in tensor] == [0, 0, 1, 1]
    assert [each.rank for each in tensor if each.is_replica_first] == [0, 2]
    every = ranks_of(Part("megatron", data=3, tensor=2, pipeline=2, context=2))
    assert [each.data_rank for each in every] == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    assert [each.rank for each in every if each.is_replica_first] == [0, 4, 8]
    assert {each.data_size for each in every} == {3}


def test_layout_not_fitting_ranks_is_refused() -> None:
    with pytest.raises(UsageFault, match="fsdp:d1t2 needs 2 processes for each part of the data, and 3 were started"):
        ranks_of(Part("fsdp", tensor=2), 3)
    actor = ranks_of(Part("megatron", data=2, tensor=2))[0]
    require_layout(actor, Part("fsdp", data=4, tensor=2), "ref")
    with pytest.raises(
        UsageFault, match=r"ref\.backend fsdp:d4 and the run's layout megatron:d2t2 cut a model"
    ) as reported:
        require_layout(actor, Part("fsdp", data=4), "ref")
    assert "ref.backend=megatron:d2t2" in str(reported.value.hint)


def test_nodes_with_unequal_process_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("WORLD_SIZE", 3), ("GROUP_WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(number))
    with pytest.raises(UsageFault, match="3 training processes over 2 nodes, 1 of them on this one"), join_ranks():
        pass


@pytest.mark.slow
def test_unshared_run_folder_is_refused_on_all_nodes(tmp_path: Path) -> None:
    """Two agents of torchrun, as on two machines; each has a folder of its own, and then a common one."""
    script = tmp_path / "shared.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from areal.errors import UsageFault\n"
        "from areal.training.ranks import join_ranks, require_shared\n"
        "folder = Path(sys.argv[1])\n"
        "with join_ranks(timeout_s=60) as ranks:\n"
        "    assert ranks.nodes == 2\n"
        "    require_shared(folder, ranks)\n"
        "    own = folder / str(ranks.rank)\n"
        "    own.mkdir()\n"
        "    try:\n"
        "        require_shared(own, ranks)\n"
        "    except UsageFault as error:\n"
        "        (own / 'error').write_text(str(error))\n"
        "names = [task.joinpath('comm').read_text().strip() for task in Path('/proc/self/task').iterdir()]\n"
        "(own / 'threads').write_text(' '.join(names))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--master-port={port}")
    with ThreadPoolExecutor() as agents:
        started = [agents.submit(ran, tmp_path, *words, f"--node-rank={n}", str(script), str(tmp_path)) for n in (0, 1)]
    assert [each.result().returncode for each in started] == [0, 0], started[0].result().stderr
    for rank in (0, 1):
        assert "a run over several nodes has one folder" in (tmp_path / str(rank) / "error").read_text()
        assert "gloo" not in (tmp_path / str(rank) / "threads").read_text()
    assert not list(tmp_path.glob("**/.shared-*"))
