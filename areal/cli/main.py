"""Entry point of ``areal``: parse, call one verb, turn what it raises into one message and an exit code.

Imports nothing but click and the static tree: this is what ``areal --help`` and completion pay for.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence

import click

from areal.cli.invocation import Invocation
from areal.cli.lazy import CONTEXT_SETTINGS, LazyGroup
from areal.cli.options import global_options
from areal.cli.tree import ROOT
from areal.interrupt import STATUS, is_interrupt
from areal.terminal import guarded

_BROKEN_PIPE = 141
_COMPLETE = "_AREAL_COMPLETE"


@click.group(cls=LazyGroup, table=ROOT, context_settings=CONTEXT_SETTINGS)
@global_options
def cli() -> None:
    """kubectl for LLM reinforcement learning, with no cluster and no daemon underneath.

    Write resources in YAML; `areal apply` makes the processes agree with them.
    """


def main() -> int:
    """The console script. The process ends here, so the collector is told that nothing is left to look at: the
    interpreter's last collections would cost a short command a tenth of its time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # A name that the terminal cannot show, half a surrogate pair of an answer: no reason to fail.
            utf8 = stream.encoding.lower() in ("utf-8", "utf8")
            stream.reconfigure(errors="backslashreplace" if utf8 else "replace")
    status = run()
    gc.freeze()
    return status


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (docs/reference/cli.md)."""
    with guarded():
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    invocation = Invocation()
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {"obj": invocation}, "areal", _COMPLETE, instruction)
    try:
        status = _invoke(list(sys.argv[1:] if args is None else args), invocation)
        sys.stdout.flush()
    except click.Abort:
        return STATUS
    except KeyboardInterrupt:
        invocation.say("interrupted")
        return STATUS
    except BrokenPipeError:
        _silence_stdout()
        return _BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the process boundary: every failure becomes a message and a status
        if is_interrupt(error):
            invocation.say("interrupted")
            return STATUS
        from areal.cli.failures import report

        return report(error, invocation)
    return status


def _invoke(args: list[str], invocation: Invocation) -> int:
    """Not ``cli.main``: that one turns a closed pipe into exit status 1."""
    try:
        with cli.make_context("areal", args, obj=invocation) as ctx:
            result = cli.invoke(ctx)
    except click.exceptions.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


def _silence_stdout() -> None:
    """The reader of our pipe left: keep the interpreter's last flush from complaining about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
