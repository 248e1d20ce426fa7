"""``areal version``."""

from __future__ import annotations

import sys

import click

from areal import __version__
from areal.cli import options
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one


@click.command()
@options.output()
@options.common
@pass_invocation
def version(cli: Invocation) -> None:
    """Print the version of areal and of the Python that runs it."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    document = {"version": __version__, "python": python, "platform": sys.platform}
    emit_one(cli, document, name=f"areal/{__version__}", text=lambda: f"areal {__version__}")
