"""Errors for people, on stderr: what happened and why, what the child said, the next command to run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from areal.cli.invocation import fancy, style
from areal.errors import ArealError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal.cli.invocation import Invocation


def report(error: BaseException, cli: Invocation) -> int:
    """Print ``error`` and return the process's exit status."""
    lines, code = _describe(error)
    if cli.debug:
        import traceback

        lines = [*traceback.format_exception(error), *lines]
    sys.stdout.flush()
    click.echo("\n".join(line.rstrip("\n") for line in lines), err=True)
    return code


def report_line(message: str, *, hint: str | None = None) -> None:
    """One more thing that went wrong, beside what the command prints."""
    sys.stdout.flush()
    click.echo("\n".join([_headline(message), *_hint(hint)]), err=True)


def error_lines(error: ArealError) -> list[str]:
    return [_headline(error.message), *_quoted(error.detail), *_hint(error.hint)]


def _describe(error: BaseException) -> tuple[list[str], int]:
    if isinstance(error, ArealError):
        return [*_diagnostics(error)] or error_lines(error), error.exit_code
    if isinstance(error, click.UsageError):
        return _usage(error), 2
    if isinstance(error, click.ClickException):
        return [_headline(error.format_message())], 2
    kind = type(error).__name__
    return [
        _headline(f"unexpected {kind}: {error}" if str(error) else f"unexpected {kind}"),
        *_hint("run the same command with --debug and report what it prints"),
    ], 1


def _usage(error: click.UsageError) -> list[str]:
    text = error.format_message()
    message = _headline(text[:1].lower() + text[1:].rstrip("."))
    if error.ctx is None:
        return [message]
    return [message, f"  {error.ctx.get_usage()}", *_hint(f"{error.ctx.command_path} --help")]


def _diagnostics(error: ArealError) -> Iterator[str]:
    """An invalid manifest: one line a fault, ``file:line:col: path: message``, and how many there are."""
    faults = getattr(error, "diagnostics", ())
    for fault in faults:
        yield from fault_lines(str(fault), getattr(fault, "hint", None))
    if faults:
        plural = "error" if len(faults) == 1 else "errors"
        yield _headline(f"{len(faults)} {plural} in the manifests; nothing was changed")


def fault_lines(text: str, hint: str | None) -> list[str]:
    """One fault of a manifest."""
    return [_paint(text, "red", bold=False), *_hint(hint)]


def _headline(message: str) -> str:
    return f"{_paint('error:', 'red')} {message}"


def _quoted(detail: str | None) -> Iterator[str]:
    for line in (detail or "").splitlines():
        yield f"  | {line}"


def _hint(hint: str | None) -> Iterator[str]:
    if hint:
        yield f"  {_paint('hint:', 'cyan')} {hint}"


def _paint(text: str, colour: str, *, bold: bool = True) -> str:
    return style(text, fg=colour, bold=bold) if fancy(sys.stderr) else text
