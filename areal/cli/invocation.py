"""What one run of ``areal`` was asked for, apart from the verb's own flags; every verb takes it first.

The shared options (``areal.cli.options``) write into it, on the root, on a group or on the verb: the last one wins.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from areal.terminal import ESCAPE, safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal.cli.output.formats import Format
    from areal.state.home import Home


class Invocation:
    """Flags as given (None: not given), and the few things derived from them on first use."""

    def __init__(self) -> None:
        self.home_flag: str | None = None
        self.context_flag: str | None = None
        self.gateway_flag: str | None = None
        self.key_file_flag: str | None = None
        self.format_flag: Format | None = None
        self.timeout_s: float | None = None
        self.lock_timeout_flag: float | None = None
        self.quiet = False
        self.verbose = 0
        self.debug = False
        self.yes = False
        self._home: Home | None = None
        self._config: Mapping[str, Any] | None = None

    @property
    def home(self) -> Home:
        if self._home is None:
            from areal.state.home import Home

            self._home = Home.resolve(self.home_flag)
            if self._home.root.exists() and not self._home.root.is_dir():
                from areal.errors import ArealError

                raise ArealError(
                    f"{self._home.root} is not a folder", hint="choose a home with --home DIR or AREAL_HOME"
                )
        return self._home

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.yaml`` of the home; an absent file is an empty one."""
        if self._config is None:
            path = f"{home_path(self.home_flag)}/config.yaml"
            if not os.path.exists(path):  # noqa: PTH110 - before every command; pathlib would cost more than the check
                return {}
            from areal.cli.configfile import read_config

            self._config = read_config(path)
        return self._config

    def default(self, name: str) -> Any:
        """A default that the user has set in ``config.yaml``, or None."""
        return (self.config.get("defaults") or {}).get(name)

    @property
    def format(self) -> Format:
        if self.format_flag is not None:
            return self.format_flag
        from areal.cli.output.formats import parse_format

        return parse_format(str(self.default("output") or "table"))

    @property
    def lock_timeout_s(self) -> float:
        if self.lock_timeout_flag is not None:
            return self.lock_timeout_flag
        from areal.cli.options import parse_seconds

        return parse_seconds(self.default("lockTimeout") or 0)

    def say(self, text: str) -> None:
        """A hint or progress for people: stderr, silent with -q."""
        if not self.quiet:
            sys.stdout.flush()
            click.echo(text, err=True)

    def tell(self, text: str) -> None:
        """Details for -v."""
        if self.verbose:
            self.say(text)


def home_path(flag: str | None) -> str:
    """The state folder without importing what reads it; ``Home.resolve`` decides the same, with its errors."""
    return os.path.expanduser(flag or os.environ.get("AREAL_HOME") or "~/.areal")  # noqa: PTH111


def interactive() -> bool:
    """Whether a question can be asked: people on both ends."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def fancy(stream: Any) -> bool:
    """Whether colour and moving lines are welcome on ``stream`` (https://no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, **look: Any) -> str:
    """``text`` in a colour, for a ``Screen``."""
    return click.style(safe(text), **look).replace("\x1b", ESCAPE)


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)
