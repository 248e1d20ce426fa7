"""``python -m areal.training --driver MODULE:FUNCTION -- --config FILE key=value ...``: a driver's process.

A driver may also be a script, ``path/driver.py``, run as by ``python path/driver.py``, or a function of it,
``path/driver.py:function``.

The working folder is on the import path. An ``ArealError`` is printed as its message and hint, and sets the exit
status; any other error is a traceback and status 1. SIGTERM ends a training loop after the current step, with a
checkpoint where these are enabled, and any other code like an interrupt."""

from __future__ import annotations

import argparse
import ast
import atexit
import inspect
import logging
import math
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
from areal.loading import add_import_folder, load_attr
from areal.services.http.process import die_with_parent
from areal.training import stopping
from areal.training.launch import FAILED, TERMINATED, is_quiet_rank, is_rank, report_error
from areal.wire.stage import report_stage

_LARGEST_STATUS = 255
_HTTP_CLIENTS = ("httpx", "httpx2", "openai", "anthropic")  # these log every call of every episode
_COLLECTIVES = "torch/distributed/distributed_c10d"
_TRAIN_EXTRA = frozenset(
    ("httptools", "mpmath", "numpy", "omegaconf", "orjson", "peft", "pyarrow", "safetensors", "torch")
) | {"transformers"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
    if is_rank():  # has its own session: a launcher that is killed cannot end it
        die_with_parent(os.getppid())
    os.environ.pop("PYTHONSAFEPATH", None)  # a launcher's, for this process alone
    add_import_folder(Path.cwd())
    if not is_quiet_rank():
        report_stage(f"importing the driver {given.driver}")
    try:
        status = load_driver(given.driver)(given.args)
    except BaseException as error:
        if stopping.requested() or is_interrupt(error):  # libraries wrap an interrupt in other errors
            status = TERMINATED if stopping.requested() else STATUS
            _report("stopped\n", status, is_consequence=is_rank())
            return status
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in _TRAIN_EXTRA:
            error = UsageFault(f"training needs the package {missing}", hint=install_command("train"))
        if is_rank() and _is_collective_error(error):
            _report(f"rank {os.environ['RANK']}: {error}\n", FAILED, is_consequence=True)
            return FAILED
        if not isinstance(error, ArealError):
            raise
        _report(error_text(error), error.exit_code)
        return error.exit_code
    return _exit_status(status, given.driver)


def _exit_status(returned: object, driver: str) -> int:
    """Return the exit status for what a driver returned. The system keeps only the last byte: 256 would be 0."""
    if isinstance(returned, int):
        return int(returned) if 0 <= returned <= _LARGEST_STATUS else FAILED
    if returned is not None:
        sys.stderr.write(
            f"warning: driver {driver} returned {type(returned).__name__}, which is no exit status: taken as 0\n"
        )
    return 0


def _report(text: str, status: int, *, is_consequence: bool = False) -> None:
    """Pass ``text`` to the launcher, or print it if there is none."""
    if not report_error(text, status, is_consequence=is_consequence):
        sys.stderr.write(text)


def _is_collective_error(error: BaseException) -> bool:
    """Return whether a collective raised the error, which means that another rank has ended."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and any(_COLLECTIVES in frame.filename for frame in frames)


def load_driver(path: str) -> Callable[[Sequence[str]], object]:
    """Import and return the driver. Raises UsageFault with the reason if that fails."""
    file, _, name = path.partition(":")
    if file.endswith(".py"):
        return _load_script(Path(file).expanduser().absolute(), name)
    return _checked(load_attr(path, "driver", within_s=math.inf), path)


def _load_script(file: Path, name: str) -> Callable[[Sequence[str]], object]:
    """Return the whole script, or its function ``name``; without a name ``main``, unless the script calls it itself."""
    if not file.is_file():
        raise UsageFault(f"there is no driver {file}")
    add_import_folder(file.parent)
    if not name and _is_executable(file):

        def script(args: Sequence[str]) -> None:
            sys.argv = [str(file), *args]
            runpy.run_path(str(file), run_name="__main__")

        return script
    name = name or "main"
    return _checked(load_attr(f"{file.stem}:{name}", "driver", within_s=math.inf), f"{file}:{name}")


def _is_executable(file: Path) -> bool:
    """Return whether the script does more than define ``main``."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
    except (SyntaxError, ValueError, OSError) as error:
        raise UsageFault(f"driver {file} cannot be read: {error}") from error
    if not any(isinstance(each, ast.FunctionDef) and each.name == "main" for each in body):
        return True
    return any(isinstance(each, ast.If) and "__name__" in ast.dump(each.test) for each in body)


def _checked(found: Any, path: str) -> Callable[[Sequence[str]], object]:
    """Return the driver. Raises UsageFault if it does not accept one list of arguments."""
    if not callable(found):
        raise UsageFault(f"driver {path} is not a function but {type(found).__name__}")
    try:
        inspect.signature(found).bind([])
    except TypeError as error:
        raise UsageFault(f"driver {path} cannot be called with one list of arguments: {error}") from error
    except ValueError:  # a builtin without a signature
        pass
    return found


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Exit with the status of ``run``, without the interpreter's finalization. Finalization stops torch's threads,
    gloo's too, inside native code, which can abort the process after a successful run."""
    try:
        status = run()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 (the process's boundary)
        sys.excepthook(type(error), error, error.__traceback__)
        report_error(f"error: rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}\n", FAILED)
        status = FAILED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_and_exit(main)
