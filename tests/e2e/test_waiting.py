"""``areal wait`` after a command that had no time left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Box

# The engine's interpreter waits at its start for the file ``go``.
HELD = """
import os, time
if any("engines.embedded" in word for word in open("/proc/self/cmdline").read().split("\\0")):
    while not os.path.exists({go!r}):
        time.sleep(0.02)
"""


@pytest.mark.extended
def test_timed_out_wait_names_command_to_continue(box: Box, tmp_path: Path) -> None:
    go = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(HELD.format(go=str(go)))
    env = f"env: {{PYTHONPATH: {tmp_path}, NUMBER: '%d'}}"
    assert box.areal("apply", "-f", box.manifest(model=env % 1), "--timeout", "4s").code == 7
    assert box.phase("model/reverse") == "Progressing"

    waiting = box.start("wait", "model/reverse", "--for", "ready", "--timeout", "200s")
    assert waiting.stderr is not None and "waiting for ready" in waiting.stderr.readline()
    assert waiting.poll() is None
    go.touch()
    error = waiting.communicate()[1]
    assert waiting.returncode == 0, error

    go.unlink()
    changed = box.manifest(model=env % 2)
    assert box.areal("apply", "-f", changed, "--timeout", "4s", "--yes").code == 7
    refused = box.areal("wait", "model/reverse", "--for", "ready", "--timeout", "200s")
    assert refused.code == 8 and "Model/reverse waits for a command: generation 2 has not converged" in refused.err
    assert "hint: areal reconcile Model/reverse" in refused.err
    go.touch()
    box.ok("reconcile", "model/reverse")
    box.ok("wait", "model/reverse", "--for", "ready", "--timeout", "60s")
