"""The commands of docs/gpu.md, "on a bare machine", as they are, with an engine on a CPU in place of one on a GPU.

AREAL_SGLANG_PYTHON=/path/to/python pytest -m sglang tests/engines/test_runbook.py --timeout=1500
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Box, box  # noqa: F401 - fixture
from tests.e2e.test_engines import engine_of
from tests.e2e.test_pages import run_blocks
from tests.services.inference.engines.conformance.engines import ON_GPU, REAL
from tests.test_documentation import blocks

pytestmark = pytest.mark.timeout(1500)
RUNS = "runs: tests/engines/test_runbook.py"


def on_a_cpu(name: str, folder: Path) -> dict[str, str]:
    """What the page's first lines are there."""
    about = engine_of(name, folder)
    env = {key: value for key, value in about["env"].items() if key not in ("AREAL_ENGINE_PYTHON", "HF_HUB_OFFLINE")}
    arguments = {key: value for key, value in about["engineArgs"].items() if key != "dtype"}
    of_job = {"  env: {$GPU}": '  env: {OMP_NUM_THREADS: "1"}'}
    return {"mem-fraction-static: 0.3": inner(arguments), 'CUDA_VISIBLE_DEVICES: "0"': inner(env), **of_job}


def inner(mapping: dict[str, str]) -> str:
    return json.dumps(mapping)[1:-1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL])
def test_runbook_commands_serve_train_and_restart_engine(box: Box, name: str) -> None:  # noqa: F811
    if REAL[name] not in os.environ:
        pytest.skip(f"{REAL[name]} names no Python that has {name}")
    page = [block for block in blocks(ROOT / "docs/gpu.md") if block[0] == RUNS]
    (box.folder / "examples").symlink_to(ROOT / "examples")
    instead = {
        "ENGINE=sglang": f"ENGINE={name}",
        "~/sglang-env/bin/python": os.environ[REAL[name]],
        "8080": str(box.port),
    }
    instead |= {} if ON_GPU else on_a_cpu(name, box.folder)
    env = {**box.env, "PYTHONPATH": str(ROOT)}
    run_blocks(page, box.home, box.folder, instead=instead, env=env, timeout_s=1400.0)
    assert (box.folder / "answer.txt").read_text().strip().isdigit()
