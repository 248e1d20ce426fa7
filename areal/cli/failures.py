"""Prints the error of a command to stderr, with the next step, and returns its exit status."""

from __future__ import annotations

import os
import sys

import click

from areal.cli.habits import option_hint
from areal.cli.options import Invocation
from areal.errors import ArealError
from areal.terminal import OutputLost, fancy, style


def report(error: BaseException, cli: Invocation) -> int:
    """Print ``error`` and return the exit status of the process. For an unexpected failure, the command defines it."""
    lines, code = _describe(error)
    if cli.debug:
        import traceback

        lines = [*traceback.format_exception(error), *lines]
    sys.stdout.flush()
    click.echo("\n".join(line.rstrip("\n") for line in lines), err=True)
    return cli.failed if code == ArealError.exit_code else code


def error_lines(error: ArealError) -> list[str]:
    return message_lines(error.message, error.hint, error.detail)


def message_lines(message: str, hint: str | None = None, detail: str | None = None) -> list[str]:
    return [
        f"{_paint('error:', 'red')} {message}",
        *(f"  | {line}" for line in (detail or "").splitlines()),
        *_hint(hint),
    ]


def fault_lines(text: str, hint: str | None) -> list[str]:
    """Return the lines of one fault of a manifest."""
    return [_paint(text, "red", bold=False), *_hint(hint)]


def _describe(error: BaseException) -> tuple[list[str], int]:
    if isinstance(error, ArealError):
        faults = getattr(error, "diagnostics", ())
        if not faults:
            return error_lines(error), error.exit_code
        lines = [line for fault in faults for line in fault_lines(str(fault), getattr(fault, "hint", None))]
        plural = "error" if len(faults) == 1 else "errors"
        last = message_lines(f"{len(faults)} {plural} in the manifests; nothing was changed")
        return [*lines, *last], error.exit_code
    if isinstance(error, click.UsageError):
        text = error.format_message()
        hint = option_hint(error)
        text = text if hint is None else text.partition(". ")[0].partition(" (")[0]
        first, *_ = message_lines(text[:1].lower() + text[1:].rstrip("."))
        if error.ctx is None:
            return [first, *_hint(hint)], 2
        return [first, f"  {error.ctx.get_usage()}", *_hint(hint or f"{error.ctx.command_path} --help")], 2
    if isinstance(error, click.ClickException):
        return message_lines(error.format_message()), 2
    if isinstance(error, OutputLost):
        return message_lines(f"cannot write to standard output: {error}"), 1
    if isinstance(error, FileNotFoundError) and not error.filename:  # only the working folder has no name
        message = f"the working folder {os.environ.get('PWD', '')} is gone".replace("  ", " ")
        return message_lines(message, "cd to a folder that exists, and run it again"), 2
    text = f"unexpected {type(error).__name__}" + (f": {error}" if str(error) else "")
    return message_lines(text, "run the same command with --debug and report what it prints"), 1


def _hint(hint: str | None) -> list[str]:
    return [f"  {_paint('hint:', 'cyan')} {hint}"] if hint else []


def _paint(text: str, colour: str, *, bold: bool = True) -> str:
    return style(text, fg=colour, bold=bold) if fancy(sys.stderr) else text
