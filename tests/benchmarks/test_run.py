"""Benchmarks again: which figures got worse, and which results are older than the code they measure."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from benchmarks.comparison import Benchmark, commits_since, compare, figures_of

BENCHMARK = Benchmark("b", ("src",), {"rows.ours*.cpu": "lower", "rate": "higher"}, ("mid", "low", "high"))


def rows(cpu: float, low: float = 1.0, high: float = 1.0, **more: Any) -> dict[str, Any]:
    ours = {"system": "ours", "connections": 16, "cpu": cpu, "mid": 1.0, "low": low, "high": high}
    return {"rows": [ours, {"system": "theirs", "connections": 16, "cpu": 1.0}], **more}


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (rows(100), rows(109), []),  # within the least spread
        (rows(100), rows(111), ["rows.ours connections=16.cpu"]),
        (rows(100, 0.8, 1.3), rows(125), []),  # within what the old result scattered
        (rows(100), rows(125, 0.7, 1.1), []),  # within what the new one does
        (rows(100, 0.8, 1.3), rows(135), ["rows.ours connections=16.cpu"]),
        (rows(100), rows(20), []),
        (rows(1, rate=100), rows(1, rate=85), ["rate"]),  # more is better
        (rows(1, rate=100), rows(1, rate=500), []),
        (rows(1, rate=[80, 100, 120]), rows(1, rate=70), []),  # a sample has a range
        (rows(0), rows(1), ["rows.ours connections=16.cpu"]),
    ],
)
def test_figure_is_worse_beyond_its_spread(before: dict[str, Any], after: dict[str, Any], worse: list[str]) -> None:
    assert [change.path for change in compare(BENCHMARK, before, after) if change.worse] == worse


def test_foreign_figures_are_ignored_and_missing_not_worse() -> None:
    assert list(figures_of(BENCHMARK, rows(1))) == ["rows.ours connections=16.cpu"]
    (only, _) = compare(BENCHMARK, rows(1, rate=3), {"rows": [], "rate": 3})
    assert (only.before, only.after, only.worse) == (1, None, False)


@pytest.mark.parametrize(
    ("before", "after", "ratios", "worse"),
    [
        ({"cpu": "A", "python_ms": 20}, {"cpu": "A", "python_ms": 22}, False, True),
        ({"cpu": "A", "python_ms": 20}, {"cpu": "A", "python_ms": 40}, False, False),
        ({"cpu": "A"}, {"cpu": "B"}, False, False),
        ({"cpu": "A"}, {"cpu": "B"}, True, True),
    ],
)
def test_absolute_figures_of_different_machines_are_not_compared(
    before: dict[str, object], after: dict[str, object], ratios: bool, worse: bool
) -> None:
    benchmark = Benchmark("x", (), {"us": "lower"}, ratios=ratios)
    (change,) = compare(benchmark, {"us": 10, "machine": before}, {"us": 20, "machine": after})
    assert change.worse is worse


def test_verdict_direction_follows_its_wording() -> None:
    def verdict(measured: float, wanted: str) -> dict[str, Any]:
        return {"verdicts": [{"what": "w", "measured": measured, "wanted": wanted}]}

    bare = Benchmark("b", ())
    (less,) = compare(bare, verdict(10, "over 5"), verdict(6, "over 5"))
    (more,) = compare(bare, verdict(10, "under 50"), verdict(60, "under 50"))
    (most,) = compare(bare, verdict(6, "at most 10"), verdict(9, "at most 10"))
    assert less.worse and more.worse and most.worse


def test_every_benchmark_compares_figures_in_its_result() -> None:
    scripts = {path.stem for path in Path(run.REPOSITORY, "benchmarks").glob("*.py")}
    catalog = {each.name: each for each in run.CATALOG}
    assert {Path(each.script).stem for each in run.CATALOG} == scripts - {"__init__", "run", "comparison", "reporting"}
    for name, benchmark in catalog.items():
        assert all(Path(run.REPOSITORY, path).exists() for path in benchmark.measures), name
        result = run.checked_in(benchmark)
        assert result is not None and figures_of(benchmark, result), name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    for number, name in enumerate(("src", "other")):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", f"change {name}", f"--date=2026-01-0{number + 1}T00:00:00Z")
    return tmp_path


@pytest.mark.parametrize(
    ("date", "paths", "since"),
    [
        ("2026-01-01T12:00:00Z", ["src"], []),
        ("2025-12-31T12:00:00Z", ["src"], ["change src"]),
        ("2026-01-01T12:00:00Z", ["src", "other"], ["change other"]),
        ("2026-01-02T00:00:00Z", ["src", "other"], []),
    ],
)
def test_result_is_stale_after_change_of_measured_path(
    repository: Path, date: str, paths: list[str], since: list[str]
) -> None:
    found = [line.partition(" ")[2] for line in commits_since(repository, paths, date)]
    assert found == since


def test_uncommitted_change_makes_a_result_old(repository: Path) -> None:
    (repository / "src").write_text("changed")
    assert commits_since(repository, ["src"], "2026-06-01T00:00:00Z") == ["uncommitted changes"]
    assert commits_since(repository, ["other"], "2026-06-01T00:00:00Z") == []


SCRIPT = """
import json, os, pathlib
folder = pathlib.Path(os.environ["AREAL_BENCH_RESULTS"])
rows = [{"program": "areal get", "ratio": %s}]
(folder / "cli.json").write_text(json.dumps({"date": "2030-01-01T00:00:00Z", "rows": rows}))
raise SystemExit(%s)
"""


@pytest.mark.parametrize(
    ("ratio", "exits", "code"), [(1.0, 0, 0), (2.0, 0, 1), (1.0, 1, 1)], ids=["same", "worse", "fails"]
)
def test_exit_code_reports_worse_figure(
    repository: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, exits: int, code: int
) -> None:
    (repository / "benchmarks" / "results").mkdir(parents=True)
    (repository / "benchmarks" / "cli.py").write_text(SCRIPT % (ratio, exits))
    before = {"date": "2031-01-01T00:00:00Z", "rows": [{"program": "areal get", "ratio": 1.0}]}
    (repository / "benchmarks" / "results" / "cli.json").write_text(json.dumps(before))
    monkeypatch.setattr(run, "REPOSITORY", repository)
    monkeypatch.setattr(run, "RESULTS", repository / "benchmarks" / "results")
    monkeypatch.setattr(run, "CATALOG", (run.CATALOG[0],))
    monkeypatch.setattr(run, "reasons_to_repeat", lambda benchmark: [])
    assert run.main(["cli"]) == code


LEAVING = """
import subprocess, sys
import reporting
child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
if sys.argv[1] == "waits":
    child += "; import time; time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
print(started.pid, started.stdout.readline(), flush=True)
if sys.argv[1] == "waits":
    started.wait()
"""


@pytest.mark.parametrize(("what", "code"), [("waits", 128 + signal.SIGTERM), ("ends", 0)])
def test_ended_benchmark_leaves_no_process(tmp_path: Path, what: str, code: int) -> None:
    """Also none that has left its session and whose parent is gone."""
    script = tmp_path / "benchmark.py"
    script.write_text(LEAVING)
    shutil.copy(Path(run.REPOSITORY, "benchmarks", "reporting.py"), tmp_path)
    with subprocess.Popen([sys.executable, str(script), what], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        if what == "waits":
            process.terminate()
        assert len(pids) == 2 and process.wait(20) == code
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_unknown_name_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(["nothing"])
    assert caught.value.code == 2


@pytest.mark.parametrize("script", sorted(Path(run.REPOSITORY, "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_benchmark_imports_exist(script: Path) -> None:
    """Also within functions, and in programs that are texts: a benchmark is run seldom, and what it measures moves."""
    tree = ast.parse(script.read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    programs = [ast.parse(text) for text in texts if "\nfrom areal" in text]
    for node in (node for each in (tree, *programs) for node in ast.walk(each)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("areal", "benchmarks")):
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}"), (
                    f"{module}.{name}"
                )
