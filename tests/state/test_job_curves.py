"""A job's numbers as columns: read as the file grows, reduced for a screen."""

from __future__ import annotations

import json
import math
import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.state.job_curves import JobCurves, read_curves
from areal.state.job_metrics import last_steps, newest_step


def write(path: Path, *lines: Any) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_update_reads_only_appended_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = JobCurves(path)
    assert not curves.update() and len(curves) == 0
    write(path, {"step": 1, "loss": 3.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert curves.update() and curves[-1] == {"step": 1, "loss": 3.0}
    before = curves.cursor
    assert not curves.update()
    with path.open("a") as file:
        file.write('ss": 2.0}\n')
    assert curves.update() and curves.curve("loss") == [(1, 3.0), (2, 2.0)] and curves.cursor > before


def test_update_rereads_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "attempt": 1, "loss": 1.0} for step in range(1, 6)))
    curves = read_curves(path)
    other = tmp_path / "other"
    write(other, *({"step": step, "attempt": 1, "loss": 2.0} for step in range(1, 3)))
    other.replace(path)
    assert curves.update() and curves.curve("loss") == [(1, 2.0), (2, 2.0)]
    path.write_text(path.read_text().replace("2.0", "4.0"))  # in place, as long as before
    assert curves.update() and curves.curve("loss") == [(1, 4.0), (2, 4.0)]
    path.unlink()
    assert curves.update() and len(curves) == 0


def test_later_attempt_replaces_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "attempt": 1, "loss": 1.0, "old": 1.0} for step in range(1, 6)))
    write(path, {"step": 3, "attempt": 2, "loss": 7.0}, {"step": 3, "attempt": 2, "own": 8.0})
    curves = read_curves(path)
    assert list(curves.steps) == [1, 2, 3, 4, 5]
    assert curves.at(3) == {"step": 3, "attempt": 2, "loss": 7.0, "own": 8.0}
    assert curves.at(4) == {"step": 4, "attempt": 1, "loss": 1.0, "old": 1.0} and curves.at(9) is None


def test_first_non_finite_value_follows_repeated_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": "nan"}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": "inf"})
    curves = read_curves(path)
    assert curves.not_finite == {"loss": 1}
    write(path, {"step": 1, "loss": 0.5, "attempt": 2})
    assert curves.update()
    assert curves.not_finite == {"loss": 3}


def test_non_finite_values_are_kept_but_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": "inf", "kl": "-inf"})
    curves = read_curves(path)
    assert curves.not_finite == {"loss": 2, "kl": 3}
    assert math.isnan(curves[1]["loss"]) and curves[2] == {"step": 3, "loss": math.inf, "kl": -math.inf}
    assert curves.reduced(["loss"]).curves["loss"].mean == [1.0, None, None]


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b'{"loss": 1}', b'{"step": 1e999}', b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"step": null}'],
)
def test_damaged_line_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1}\n' + line + b'\n{"step": 2, "loss": 2}\n')
    assert read_curves(path).curve("loss") == [(1, 1.0), (2, 2.0)]


def test_line_longer_than_a_block_is_one_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "text": "x" * (3 << 20), "loss": 1.0}, {"step": 2, "loss": 2.0})
    assert read_curves(path).curve("loss") == [(1, 1.0), (2, 2.0)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40), st.integers(1, 3), st.dictionaries(st.sampled_from("abc"), st.floats() | st.text())
        ),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_reading_in_parts_equals_reading_at_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], parts: int
) -> None:
    path = tmp_path_factory.mktemp("job") / "metrics.jsonl"
    path.touch()
    growing, merged = JobCurves(path), dict[int, dict[str, Any]]()
    held: list[tuple[JobCurves, str, int]] = []
    for place, (step, attempt, numbers) in enumerate(lines):
        line = {"step": step, "attempt": attempt} | {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in numbers.items()
        }
        write(path, line)
        words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
        line = {name: words.get(value, value) if isinstance(value, str) else value for name, value in line.items()}
        line = {name: value for name, value in line.items() if not isinstance(value, str)}
        earlier = merged.get(step, {})
        merged[step] = earlier | line if earlier.get("attempt") == attempt else line
        if place % parts == 0:
            growing.update()
            held.append((snapshot := growing.snapshot(), repr(list(snapshot)[:-1]), len(snapshot)))
            snapshot.reduced("abc", parts)  # what it keeps of whole buckets serves later reductions
    growing.update()
    for snapshot, before, count in held:  # only its last step has had more numbers
        assert (repr(list(snapshot)[:-1]), len(snapshot)) == (before, count)
    at_once = read_curves(path)
    assert repr(growing.reduced("abc", parts)) == repr(at_once.reduced("abc", parts))
    assert repr(list(growing)) == repr(list(at_once)) and growing.not_finite == at_once.not_finite
    expected = [merged[step] for step in sorted(merged)]
    assert [repr(sorted(line.items())) for line in at_once] == [repr(sorted(line.items())) for line in expected]


@given(count=st.integers(1, 3000), most=st.integers(1, 400), seed=st.integers(0, 9))
def test_reduced_curve_keeps_every_extreme_in_bounded_points(count: int, most: int, seed: int) -> None:
    draw, curves = random.Random(seed), JobCurves(Path("none"))
    values = [draw.gauss(0, 1) for _ in range(count)]
    for step, value in enumerate(values, 1):
        curves._take(json.dumps({"step": step, "loss": value}).encode())
    found = curves.reduced(["loss", "unknown"], most)
    points = found.curves["loss"]
    assert len(found.starts) == len(points.mean) <= most and list(found.curves) == ["loss"]
    lows, highs = points.low or points.mean, points.high or points.mean
    assert min(x for x in lows if x is not None) == pytest.approx(min(values), rel=1e-6)
    assert max(x for x in highs if x is not None) == pytest.approx(max(values), rel=1e-6)


def test_reduced_curve_continues_at_stable_bucket(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "loss": float(step)} for step in range(1, 101)))
    curves = read_curves(path)
    whole = curves.reduced(["loss"], 30)
    assert whole.size == 4
    write(path, {"step": 101, "loss": 999.0})
    curves.update()
    rest = curves.reduced(["loss"], 30)
    assert rest.size == 4 and rest.starts[-1] == 100 and rest.curves["loss"].high[-1] == 999.0
    assert curves.reduced(["loss"], 30, first=11, last=20).starts == list(range(11, 21))


def test_reduction_of_grown_curve_updates_only_last_buckets() -> None:
    curves = JobCurves(Path("none"))
    for step in range(1, 5001):
        curves._take(b'{"step": %d, "loss": %d}' % (step, step))
    earlier = curves.reduced(["loss"], 100)
    older = curves.snapshot()
    sliced: list[int] = []

    class Counted(array):
        def __getitem__(self, at: Any) -> Any:
            found = array.__getitem__(self, at)
            sliced.append(len(found) if isinstance(at, slice) else 1)
            return found

    curves.columns["loss"] = Counted("d", curves.columns["loss"])
    curves._take(b'{"step": 5001, "loss": 9999}')
    now = curves.reduced(["loss"], 100)
    assert now.curves["loss"].high[-1] == 9999.0 and sum(sliced) <= 2 * now.size
    assert older.reduced(["loss"], 100) == earlier, "what others read stays"
    curves._take(b'{"step": 3, "attempt": 2, "loss": -5}')
    assert curves.reduced(["loss"], 100).curves["loss"].low[0] == -5.0


def test_sample_of_a_long_file_reads_a_few_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "loss": float(step), "pad": "x" * 200} for step in range(20_000)))
    found = JobCurves(path).sample(200)
    assert 150 <= len(found) <= 202 and found.steps[-1] == 19_999 and found.steps[0] < 200


def test_unreadable_file_raises(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl" if os.name == "posix" else ""):
        read_curves(tmp_path / "metrics.jsonl")


def test_float_step_counts_as_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 3.0}, {"step": 2.0, "loss": 2.0})
    curves = read_curves(path)
    assert set(curves.columns) == {"loss"}
    assert [repr(row["step"]) for row in (*curves, newest_step(path), *last_steps(path, 1 << 20))] == list("12212")
