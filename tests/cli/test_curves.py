"""A job's curves: a line of the terminal each, or a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.cli.curves import curves_of, plot, sparkline
from areal.errors import ArealError
from areal.installation import install_command

STEPS = [
    {"step": step, "attempt": 1, "time": 1.0, "reward/mean": step / 50, "time/step": 0.1, "loss": 1.0 / step}
    for step in range(1, 51)
]


def test_curves_are_the_numbers_of_each_step() -> None:
    curves = curves_of([*STEPS, {"step": 51, "loss": "nan", "note": "x", "done": True}])
    assert sorted(curves) == ["loss", "reward/mean", "time/step"]
    assert curves["reward/mean"][-1] == (50, 1.0)
    assert list(curves_of(STEPS, ["loss"])) == ["loss"]


def test_sparkline_rises_with_its_values_in_at_most_its_width() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▄█" or sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_plot_is_a_picture_with_what_the_run_is_for_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(curves_of(STEPS), str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    plot(curves_of(STEPS), str(tmp_path / "p.svg"))
    text = (tmp_path / "p.svg").read_text()
    assert text.index("reward/mean") < text.index("loss") < text.index("time/step")


def test_plot_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ArealError, match=r"cannot draw into .*/none/p.png"):
        plot(curves_of(STEPS), str(tmp_path / "none" / "p.png"))
    with pytest.raises(ArealError, match=r"cannot draw into .*p.nothing"):
        plot(curves_of(STEPS), str(tmp_path / "p.nothing"))


def test_plot_without_what_draws_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ArealError, match="not installed") as caught:
        plot(curves_of(STEPS), str(tmp_path / "p.png"))
    assert caught.value.hint == install_command("plot")
