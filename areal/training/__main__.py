"""``python -m areal.training --driver MODULE:FUNCTION -- --config FILE key=value ...``: a driver's process.

A driver may also be a script, ``path/driver.py``, which runs as by ``python path/driver.py``, or a function of it,
``path/driver.py:function``.

The working folder is on the import path. A failure that a user can act on is its message and a hint, with the exit
status of its kind; anything else is a traceback and status 1. SIGTERM ends a run after the step that it is in, with a
checkpoint where the run keeps some, and anything else as an interrupt does: what is open is closed.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import inspect
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from areal.api.config.loading import error_text
from areal.errors import ArealError, UsageFault
from areal.installation import install_command
from areal.interrupt import STATUS, is_interrupt
from areal.loading import load_attr
from areal.services.http.process import die_with_parent
from areal.training import stopping
from areal.training.launch import is_quiet_rank, is_rank, leave_note

_TERMINATED = 128 + signal.SIGTERM
_FAILED = 1
_HTTP_CLIENTS = ("httpx", "httpx2", "openai", "anthropic")  # of agents: a line for every call of every episode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m areal.training")
    parser.add_argument("--driver", required=True, help="module:function, or path/driver.py")
    parser.add_argument("args", nargs="*", help="passed on to the driver")
    given = parser.parse_args(argv)
    level = "ERROR" if is_quiet_rank() else os.environ.get("AREAL_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format=_FORMAT)
    if level != "DEBUG":
        for client in _HTTP_CLIENTS:
            logging.getLogger(client).setLevel(logging.WARNING)
    if is_quiet_rank():
        warnings.simplefilter("ignore")
    stopping.on_sigterm()
    if is_rank():  # in a session of its own: its launcher cannot end it when killed
        die_with_parent(os.getppid())
    sys.path.insert(0, str(Path.cwd()))
    try:
        status = _driver(given.driver)(given.args)
    except BaseException as error:
        if stopping.requested() or is_interrupt(error):  # libraries make other errors of an interrupt
            status = _TERMINATED if stopping.requested() else STATUS
            _say("stopped\n", status, lost=is_rank())
            return status
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in _TRAIN_EXTRA:
            error = UsageFault(f"training needs the package {missing}", hint=install_command("train"))
        if is_rank() and _of_another_rank(error):
            _say(f"rank {os.environ['RANK']}: {error}\n", _FAILED, lost=True)
            return _FAILED
        if not isinstance(error, ArealError):
            raise
        _say(error_text(error), error.exit_code)
        return error.exit_code
    return status if isinstance(status, int) else 0


def _say(text: str, status: int, *, lost: bool = False) -> None:
    """Leave ``text`` to the launcher; without one, write it."""
    if not leave_note(text, status, lost=lost):
        sys.stderr.write(text)


def _of_another_rank(error: BaseException) -> bool:
    """Whether a collective raised it: that fails when another rank has ended, and at nothing that a driver does."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and any(_COLLECTIVES in frame.filename for frame in frames)


_COLLECTIVES = "torch/distributed/distributed_c10d"
_TRAIN_EXTRA = frozenset(
    ("aiohttp", "math_verify", "numpy", "omegaconf", "orjson", "peft", "pyarrow", "safetensors", "torch")
) | {"transformers"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _driver(path: str) -> Callable[[Sequence[str]], object]:
    """Raises UsageFault saying why it cannot be imported."""
    file, _, name = path.partition(":")
    if file.endswith(".py"):
        return _of_script(Path(file).expanduser().absolute(), name)
    return _taking_arguments(load_attr(path, "driver"), path)


def _of_script(file: Path, name: str) -> Callable[[Sequence[str]], object]:
    """The script itself, or its function ``name``; ``main`` where it only defines that."""
    if not file.is_file():
        raise UsageFault(f"there is no driver {file}")
    sys.path.insert(0, str(file.parent))
    if not name and _runs_itself(file):

        def script(args: Sequence[str]) -> None:
            sys.argv = [str(file), *args]
            runpy.run_path(str(file), run_name="__main__")

        return script
    name = name or "main"
    return _taking_arguments(load_attr(f"{file.stem}:{name}", "driver"), f"{file}:{name}")


def _runs_itself(file: Path) -> bool:
    """Whether the script does something but to define a ``main``."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
    except (SyntaxError, ValueError, OSError) as error:
        raise UsageFault(f"driver {file} cannot be read: {error}") from error
    if not any(isinstance(each, ast.FunctionDef) and each.name == "main" for each in body):
        return True
    return any(isinstance(each, ast.If) and "__name__" in ast.dump(each.test) for each in body)


def _taking_arguments(found: Any, path: str) -> Callable[[Sequence[str]], object]:
    if not callable(found):
        raise UsageFault(f"driver {path} is no function, but {type(found).__name__}")
    try:
        inspect.signature(found).bind([])
    except TypeError as error:
        raise UsageFault(f"driver {path} cannot be called with one list of arguments: {error}") from error
    except ValueError:  # no signature to be had
        pass
    return found  # type: ignore[no-any-return]


def end(run: Callable[[], int]) -> NoReturn:
    """With the status of ``run``. The interpreter's own end unwinds what threads of torch's are in, gloo's after the
    group is destroyed: where that is native code the process aborts, and a run that was well has failed."""
    try:
        status = run()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 (the process's boundary)
        sys.excepthook(type(error), error, error.__traceback__)
        leave_note(f"error: rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}\n", _FAILED)
        status = _FAILED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main)
