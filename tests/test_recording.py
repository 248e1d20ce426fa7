"""``tools/recording.py``: a picture of what a real terminal showed, and the one in the README of today's commands."""

from __future__ import annotations

import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools import recording

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "quickstart.svg"
LIVE = PICTURE.with_name("live.svg")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def screens(svg: str) -> list[str]:
    """The text of each frame, by its rows."""
    root = ElementTree.fromstring(svg)
    lines = {item.get("id"): "".join(item.itertext()) for item in root.iter(f"{SVG}text")}
    (film,) = (item for item in root.iter(f"{SVG}g") if item.get("id") == "film")
    return ["\n".join(lines[use.get("href", "#")[1:]] for use in frame) for frame in film]


def test_readme_picture_has_every_command_and_result() -> None:
    shown = screens(PICTURE.read_text(encoding="utf-8"))
    assert [command for command in recording.COMMANDS if not any(f"$ {command}\n" in each for each in shown)] == [], (
        "record it again: python tools/recording.py docs/images/quickstart.svg"
    )
    assert any(each.split("\n")[1:2] == ["4312"] for each in shown) and any("\n4321\n" in each for each in shown)
    assert "![" in (PICTURE.parents[2] / "README.md").read_text() and PICTURE.stat().st_size < 200_000


def test_line_is_split_by_color_and_weight() -> None:
    line = "a\x1b[1;32mb <c>\x1b[0m d\x1b[2me\x1b[39m\x1b(B"
    assert recording.spans(line) == [
        ("a", "", False),
        ("b <c>", "#98c379", True),
        (" d", "", False),
        ("e", "#7f8794", False),
    ]
    assert "b &lt;c&gt;" in recording.svg([(line, 1.0)], "title")


def test_equal_frames_are_merged_with_total_time() -> None:
    svg = recording.svg([("a\n", 1.0), ("a\n", 2.0), ("b\n", 1.0)], "title")
    assert screens(svg) == ["a", "b"]
    assert f"animation:film {3.0 + recording._END_S:.1f}s" in svg and re.search(r"37\.500%\{[^}]*-\d+px", svg)


@needs_tmux
@pytest.mark.extended
def test_recording_of_a_view_shows_each_key(tmp_path: Path) -> None:
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    (tmp_path / "view.sh").write_text("while read -rsn1 k && [ $k != q ]; do echo got $k; done")
    shown = screens(recording.record_view("bash view.sh", ["a", "b"], tmp_path, env))
    assert any(each.endswith("got a") for each in shown) and shown[-1].endswith("got a\ngot b")


def test_picture_of_the_live_view_has_its_tables_and_pages() -> None:
    shown = "\n".join(screens(LIVE.read_text(encoding="utf-8")))
    for words in (f"$ {recording.LIVE}", "trainjob/learn", "TOKENS/S", "Conditions"):
        assert words.lower() in shown.lower(), f"{words}: record it again (CONTRIBUTING.md)"
    assert LIVE.stat().st_size < 200_000


@needs_tmux
@pytest.mark.extended
def test_recording_shows_command_output(tmp_path: Path) -> None:
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    ended: list[str] = []
    svg = recording.record(["printf 'one\\ntwo\\n'", "echo x"], tmp_path, env, ended.append)
    assert ended == ["printf 'one\\ntwo\\n'", "echo x"]
    shown = screens(svg)
    assert "$ printf 'one\\ntwo\\n'\none\ntwo\n$" in shown and shown[-1] == "$ echo x\nx\n$"
    assert not any("status" in each for each in shown), "how the shell is asked is not shown"


@needs_tmux
@pytest.mark.extended
def test_recording_of_failing_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(recording.Failed, match="exit status 3\n"):
        recording.record(["(exit 3)"], tmp_path, {"PATH": "/usr/bin:/bin"}, lambda command: None)
