from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.runtime.causes import failing_line, first_exception, run_log_paths, starts
from areal.runtime.logs import tail

from .support import unhurried

START = "[areal] 2026-01-01T00:00:00Z started pid 7\n"
TRACEBACK = """Traceback (most recent call last):
  File "engine.py", line 3, in <module>
    load()
  File "engine.py", line 1, in load
    raise ValueError("no such model")
ValueError: no such model
"""


def write(tmp_path: Path, *texts: str) -> tuple[str, ...]:
    paths = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.log"
        path.write_text(text)
        paths.append(str(path))
    return tuple(paths)


def test_tail_takes_the_last_lines_over_files(tmp_path: Path) -> None:
    paths = write(tmp_path, "a\nb\n", "c\nd\n")

    assert tail(paths, 3) == ["b", "c", "d"]
    assert tail(paths, 99) == ["a", "b", "c", "d"]
    assert tail(paths, 0) == []


def test_tail_counts_unterminated_last_line(tmp_path: Path) -> None:
    assert tail(write(tmp_path, "a\nb\nc"), 2) == ["b", "c"]


def test_tail_skips_file_rotated_away(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "a\n")

    assert tail((str(tmp_path / "gone"), path), 5) == ["a"]


@unhurried
@given(st.lists(st.text("ab\u00e9 ", max_size=300), max_size=60), st.integers(1, 20))
def test_tail_of_any_text_equals_the_end_of_all_lines(tmp_path_factory: object, lines: list[str], n: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text("".join(f"{line}\n" for line in lines), newline="")
        assert tail((str(path),), n) == lines[-n:]


def test_first_exception_is_first_traceback_of_last_start(tmp_path: Path) -> None:
    other = TRACEBACK.replace("ValueError: no such model", "KeyError: 'later'")
    old = TRACEBACK.replace("ValueError: no such model", "OSError: of the start before")
    paths = write(tmp_path, START + old, START + "loading\n" + TRACEBACK + "noise\n" + other)

    found = first_exception(paths)

    assert found == TRACEBACK.rstrip()


def test_first_exception_follows_exception_chain(tmp_path: Path) -> None:
    chained = (
        TRACEBACK
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK.replace("ValueError: no such model", "RuntimeError: engine failed")
    )

    found = first_exception(write(tmp_path, START + chained + "after\n"))

    assert found is not None
    assert found.endswith("RuntimeError: engine failed")
    assert "ValueError: no such model" in found


def test_first_exception_of_worker_drops_prefix(tmp_path: Path) -> None:
    prefix = "(EngineCore_0 pid=77) "
    text = "".join(f"{prefix}{line}\n" for line in TRACEBACK.splitlines())

    assert first_exception(write(tmp_path, START + text + f"{prefix}more\n")) == TRACEBACK.rstrip()


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "2026-01-01 12:00:00 ERROR engine: the port is in use",
        "OSError: [Errno 98] Address already in use",
        "api_server.py: error: argument --dtype: invalid choice: 'flaot32'",
        "sglang serve: error: argument --dtype: invalid choice: 'flaot32'",
    ],
)
def test_first_exception_without_traceback_is_first_error_line(tmp_path: Path, line: str) -> None:
    usage = "usage: x [--log-level {CRITICAL,ERROR,WARNING}]\n         [--level {DEBUG,ERROR}]"
    assert first_exception(write(tmp_path, f"{START}fine\n{usage}\n{line}\nERROR: later\n")) == line


def test_first_exception_of_pending_start_is_of_previous_start(tmp_path: Path) -> None:
    assert first_exception(write(tmp_path, START + TRACEBACK, START + "loading again\n")) == TRACEBACK.rstrip()


FAULTS = "pydantic_core._pydantic_core.ValidationError: 1 validation error for "
TOO_LONG = "User-specified max_model_len (100000) is greater than the derived max_model_len (512)"
SEE = "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
VLLM = "(Worker pid=26109) ERROR 11-28 22:15:44 [multiproc_executor.py:1063] "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "nanobind: leaked 3 instances!\n"
            + f"{VLLM}WorkerProc hit an exception.\n"
            + "".join(f"{VLLM}{line}\n" for line in TRACEBACK.splitlines())
            + "(APIServer pid=1) INFO: Shutting down\n",
            "ValueError: no such model",
        ),
        (
            "usage: launch_server.py [-h] --model-path MODEL_PATH\n"
            "launch_server.py: error: unrecognized arguments: --no-such-thing\n",
            "launch_server.py: error: unrecognized arguments: --no-such-thing",
        ),
        ("loading\nerror: reward cannot be imported (r.py:3)\nhint: x\n", "error: reward cannot be imported (r.py:3)"),
        ("[2026-11-28 22:03:11] Scheduler hit an exception: " + TRACEBACK, "ValueError: no such model"),
        ("loading\n", ""),
        (
            TRACEBACK.replace("ValueError: no such model", f"{FAULTS}ModelConfig\n  Value error, {TOO_LONG}\n{SEE}"),
            f"{FAULTS}ModelConfig: Value error, {TOO_LONG}",
        ),
        (
            TRACEBACK.replace("ValueError: no such model", f"{FAULTS}M\nseed\n  Input should be an integer\n{SEE}"),
            f"{FAULTS}M: seed: Input should be an integer",
        ),
        (
            "".join(f"{VLLM}{line}\n" for line in TRACEBACK.splitlines()[:-1])
            + f"{VLLM}RuntimeError: Error(s) in loading state_dict for M:\n{VLLM}\tsize mismatch for head\n",
            "RuntimeError: Error(s) in loading state_dict for M: size mismatch for head",
        ),
    ],
    ids=["vllm", "arguments", "areal", "sglang", "none", "pydantic", "pydantic-field", "torch"],
)
def test_failing_line_is_engine_error(tmp_path: Path, text: str, expected: str) -> None:
    assert failing_line(write(tmp_path, START + text)) == expected


_CODE = {
    "deep": "\n".join(f"def f{n}():\n f{n + 1}()" for n in range(60)) + "\ndef f60():\n raise OSError('bottom')\nf0()",
    "chained": "try:\n 1/0\nexcept Exception as e:\n raise KeyError('x') from e",
    "group": "raise ExceptionGroup('several', [ExceptionGroup('in', [ValueError(1)]), TypeError(2)])",
    "task": "import asyncio\nasync def f():\n raise RuntimeError('deep')\nasync def main():\n"
    " async with asyncio.TaskGroup() as group: group.create_task(f())\nasyncio.run(main())",
    "local": "def f():\n class Mine(Exception): pass\n raise Mine('a\\nb')\nf()",
    "syntax": "compile('x = (', 's.py', 'exec')",
}
_SAYS = {
    "deep": ["OSError: bottom"],
    "chained": ["KeyError: 'x'", "ZeroDivisionError: division by zero"],
    "group": [
        "ValueError: 1",
        "ExceptionGroup: several (2 sub-exceptions)",
        "ExceptionGroup: in (1 sub-exception)",
    ],
    "task": ["RuntimeError: deep", "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"],
    "local": ["f.<locals>.Mine: a"],
    "syntax": ["SyntaxError: '(' was never closed"],
}


@pytest.mark.parametrize("name", _CODE)
@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) "])
def test_failing_line_of_cut_traceback_names_an_exception(tmp_path: Path, name: str, prefix: str) -> None:
    printed = subprocess.run([sys.executable, "-c", _CODE[name]], capture_output=True, text=True, timeout=60).stderr
    lines = [f"{prefix}{line}" for line in printed.splitlines()]
    if prefix:  # another process writes between them
        lines = [each for line in lines for each in (line, "(Worker pid=8) INFO: at work")]
    assert failing_line(write(tmp_path, START + "".join(f"{line}\n" for line in lines))) == _SAYS[name][0]
    found = {
        failing_line(write(tmp_path, START + "".join(f"{line}\n" for line in lines[:count])))
        for count in range(len(lines))
    }
    assert found <= {"", *_SAYS[name]}


@pytest.mark.parametrize("text", ["", START, START + "all went well\n0 errors\n", "[areal] x ERROR: ours\n"])
def test_quiet_log_has_no_first_exception(tmp_path: Path, text: str) -> None:
    assert first_exception(write(tmp_path, text)) is None


def test_starts_return_output_of_each_start(tmp_path: Path) -> None:
    paths = write(tmp_path, START + "one\n" + START + "two\n", "still two\n" + START + "three\n")

    assert [lines[1:] for lines in starts(paths)] == [["one"], ["two", "still two"], ["three"]]


def test_run_log_paths_are_in_order_of_age(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for name in ("current.log", "current.log.2", "current.log.10", "current.log.1", "current.log.1.times", "shim.log"):
        (tmp_path / "log" / name).write_text("")

    names = [Path(path).name for path in run_log_paths(str(tmp_path))]

    assert names == ["current.log.10", "current.log.2", "current.log.1", "current.log"]
