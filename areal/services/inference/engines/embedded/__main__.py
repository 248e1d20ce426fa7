"""``python -m areal.services.inference.engines.embedded --model-path DIR``

The process answers /health with its stage from the first moment on, and /ready with 200 once it serves. A model that
cannot be served ends it: one line on stderr, exit status 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from typing import NoReturn

from areal.services.inference.engines.embedded.loading import inspect
from areal.services.inference.engines.embedded.memory import use_one_heap
from areal.services.inference.engines.embedded.settings import add_arguments, settings
from areal.services.web.options import add_serve_arguments, exit_on_failure, serve_options
from areal.services.web.stage import report_stage

# A step is many short operations, each of which gives the interpreter away: the thread that then waits for it must not
# wait for the default of 5 ms.
_SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    use_one_heap()
    parser = argparse.ArgumentParser(prog="areal-embedded-engine")
    add_serve_arguments(parser, port=8083)
    add_arguments(parser)
    args = parser.parse_args()
    serving, options = serve_options(args), settings(args)
    report_stage("reading config")
    folder = inspect(options.model_path)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    from areal.services.inference.engines.embedded.process import run  # after the folder was found whole
    from areal.services.web.serve import run_service

    run_service(lambda: run(folder, options, serving), serving.log_level)


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
