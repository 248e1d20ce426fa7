"""``python -m areal.services.inference.engines.embedded --model-path DIR``

The process answers /health with its stage from the first moment on, and /ready with 200 once it serves. A model that
cannot be served ends it: one line on stderr, exit status 1.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from typing import NoReturn

from areal.hub import model_folder
from areal.services.http.process import exit_on_failure, read_config, report_stage, serve_options
from areal.services.inference.engines.embedded.loading import adapter_folders, inspect_folder
from areal.wire.processes import EmbeddedEngineConfig

# A step is many short operations, each of which gives the interpreter away: the thread that then waits for it must not
# wait for the default of 5 ms.
_SWITCH_INTERVAL_S = 0.0005
_M_ARENA_MAX = -8  # of glibc's <malloc.h>


def main() -> None:
    use_one_heap()
    config = read_config(EmbeddedEngineConfig, "areal-embedded-engine")
    serving, lora = serve_options(config), adapter_folders(config.lora)
    report_stage("reading config")
    folder = inspect_folder(model_folder(config.model_path))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    from areal.services.http.serve import run_loop
    from areal.services.inference.engines.embedded.app import run

    run_loop(lambda: run(folder, config, lora, serving), serving.log_level)


def use_one_heap() -> None:
    """Before any thread is there. With a heap a thread, as glibc has it, the weights that an update replaces go back to
    the system, and the next ones cost a page fault every four kilobytes again."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; elsewhere the allocator decides
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def end(status: int) -> NoReturn:
    """With that status also while the model is loaded. The interpreter's own end would stop that thread in the middle
    of native code, which cannot be unwound: the process would abort."""
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    end(exit_on_failure(main))
