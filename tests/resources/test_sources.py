"""Reading: pipes, links, overlays beside files, and nothing that depends on the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from areal.resources.render import RenderRequest, render

from .helpers import HEAD, model

_PRINT = """
import sys
from areal.resources.diagnostics import ManifestError
from areal.resources.graph import graph
from areal.resources.render import RenderRequest, render
try:
    found = render(RenderRequest((sys.argv[1],), env={"HOME": "/h"}))
    print([(str(r.ref), r.spec, dict(r.labels), r.depends_on) for r in found.resources], found.references, found.env)
    print(graph(found.resources, "dot"))
except ManifestError as error:
    print(error)
"""


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(model(),), daemon=True)
    writer.start()
    (found,) = render(RenderRequest((str(pipe),))).resources
    writer.join(timeout=30)
    assert found.name == "qwen"


def test_links_to_folders_are_not_followed_down(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(model())
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = render(RenderRequest((str(tmp_path),), recursive=True)).resources
    assert [item.name for item in found] == ["qwen"]


def test_files_and_an_overlay_render_together(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(model(name="one"))
    (tmp_path / "prod").mkdir()
    (tmp_path / "prod" / "areal.overlay.yaml").write_text(
        f"{HEAD}kind: Overlay\nbases: [../one.yaml]\nnamePrefix: p-\n"
    )
    found = render(RenderRequest((str(tmp_path / "one.yaml"),), overlay=str(tmp_path / "prod"))).resources
    assert [item.name for item in found] == ["one", "p-one"]


def test_rendering_is_the_same_in_every_process(tmp_path: Path) -> None:
    text = "---\n".join(model("{backend: embedded, path: m, env: {B: b, A: '${{ env.HOME }}'}}", name=n) for n in "cab")
    job = f"{HEAD}kind: TrainJob\nmetadata: {{name: j, labels: {{z: z, a: a}}, dependsOn: [model/c, model/a]}}\n"
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"{text}---\n{job}spec: {{driver: 'a:b'}}\n")
    bad.write_text(f"{text}---\n{job}spec: {{drivr: 1, cofig: 2, rollot: 3}}\n")
    for path in (good, bad):
        outputs = {
            subprocess.run(
                [sys.executable, "-c", _PRINT, str(path)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert len(outputs) == 1 and outputs != {""}
