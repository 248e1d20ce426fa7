"""A model folder's own code is never run, and no question is asked, also on a terminal that says yes."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.processes import REPOSITORY
from tests.services.tokenizer_folder import write_tokenizer

_SAFE = ("GenerationConfig", "load_hf_tokenizer")  # read JSON alone

LOADS = {
    "tokenizer": "from areal.dataset.tokenizers import load_hf_tokenizer; load_hf_tokenizer(folder)",
    "processor": (
        "from areal.dataset.tokenizers import load_hf_processor_and_tokenizer; load_hf_processor_and_tokenizer(folder)"
    ),
    "trainer": (
        "from areal.api.cli_args import TrainEngineConfig; from areal.training.engines.huggingface import load_model;"
        "from areal.training.ranks import Ranks; import torch;"
        "load_model(TrainEngineConfig(path=folder), Ranks(0, 1, torch.device('cpu')))"
    ),
    "engine": (
        "import torch, pathlib; from areal.services.inference.engines.embedded.transformers_runner import _load;"
        "_load(pathlib.Path(folder), torch.float32)"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose configuration, tokenizer, processor and weights are code of its own."""
    folder = write_tokenizer(tmp_path / "model")
    names = {
        "AutoConfig": "theirs.Config",
        "AutoModelForCausalLM": "theirs.Model",
        "AutoModelForTokenClassification": "theirs.Model",
        "AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"],
        "AutoProcessor": "theirs.Processor",
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": names}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": names["AutoTokenizer"]}})
    )
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Theirs", "auto_map": {"AutoProcessor": names["AutoProcessor"]}})
    )
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("load", LOADS)
def test_model_code_is_not_run_despite_yes_on_terminal(folder: Path, tmp_path: Path, load: str) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 20)
    program = f"folder = {str(folder)!r}\n" + LOADS[load].replace("; ", "\n").replace(";", "\n")
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    try:
        run = subprocess.run(
            [sys.executable, "-c", program],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=REPOSITORY,
            env=env,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in run.stdout + run.stderr
    assert run.returncode != 0 and ("trust_remote_code" in run.stderr or "code of the model's own" in run.stderr)


def test_every_transformers_load_disables_remote_code() -> None:
    found, silent = 0, []
    for file in (REPOSITORY / "areal").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            holder = ast.unparse(node.func.value)
            if node.func.attr not in ("from_pretrained", "from_config") or holder in _SAFE:
                continue
            found += 1
            keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if keywords.get("trust_remote_code") != "False" and "options" not in keywords.values():
                silent.append(f"{file.relative_to(REPOSITORY)}:{node.lineno} {ast.unparse(node)}")
    assert not silent and found > 5
