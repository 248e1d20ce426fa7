"""``areal inf trajectories show`` on a terminal and off one."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.tokenizer_folder import write_tokenizer
from tests.trajectories.samples import branched


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(branched().document()) + "\n", encoding="utf-8")
    return path


def on_a_terminal(file: Path, *words: str, **env: str) -> str:
    """What the command sends to a terminal."""
    reader, writer = pty.openpty()
    argv = [sys.executable, "-m", "areal.cli", "inf", "trajectories", "show", str(file), *words]
    environment = {**os.environ, "TERM": "xterm-256color", "AREAL_HOME": str(file.parent / "home"), **env}
    with subprocess.Popen(argv, stdin=writer, stdout=writer, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(writer)
        output = b""
        try:
            while piece := os.read(reader, 65536):
                output += piece
        except OSError:  # Linux says so when the other end is closed
            pass
        assert process.wait(60) == 0
    os.close(reader)
    return output.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("words", "code"), [((), "38;5;208"), (("--color", "version"), "38;5;214")])
def test_tokens_are_painted_on_a_terminal(file: Path, tmp_path: Path, words: tuple[str, ...], code: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "model")
    assert f"\x1b[{code}m" in on_a_terminal(file, "--tokenizer", str(tokenizer), *words)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_are_written_when_disabled(file: Path, env: dict[str, str]) -> None:
    output = on_a_terminal(file, **env)
    assert "\x1b" not in output
    assert "prompt:\n    1 2\n  answer:\n    3" in output
