"""How vLLM's server is started, by the flags and commands that the installed version has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.inference.engines.conformance.engines import PLUGINS


@pytest.mark.parametrize(
    ("parser", "given", "passed"),
    [
        ("openai/cli_args.py", [], []),  # 0.27: it has the package scale_out, and no flag for it
        ("launchers/cli_args.py", [], ["--enable-scale-out"]),  # 0.32
        ("launchers/cli_args.py", ["--no-enable-scale-out"], ["--no-enable-scale-out"]),
    ],
    ids=["0.27", "0.32", "given"],
)
def test_scale_out_flag_is_set_when_parser_supports_it(
    tmp_path: Path, parser: str, given: list[str], passed: list[str]
) -> None:
    files = {
        "scale_out/__init__.py": "",
        "openai/api_server.py": "import json, sys\nprint(json.dumps(sys.argv[1:]))\n",
        parser: "class FrontendArgs:\n    tokens_only: bool = False\n",
    }
    if parser.startswith("launchers"):
        files[parser] += "    enable_scale_out: bool = False\n"
    for name, text in files.items():
        path = tmp_path / "vllm" / "entrypoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "areal_vllm_server", "--model", "m", *given],
        env={"PYTHONPATH": f"{PLUGINS / 'vllm_plugin'}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["--model", "m", *passed]


@pytest.mark.parametrize(("engine", "module"), [("vllm", "areal_vllm_server"), ("sglang", "areal_sglang")])
def test_missing_engine_is_one_line_with_the_next_step(engine: str, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", module],
        env={"PYTHONPATH": str(PLUGINS / f"{engine}_plugin")},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"error: {engine} is not installed in {sys.executable}: ")
    assert f"pip install 'arealctl[{engine}]'" in line and "AREAL_ENGINE_PYTHON" in line
