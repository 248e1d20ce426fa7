"""``areal completion``: the script that teaches a shell to complete ``areal``."""

from __future__ import annotations

import os

import click

from areal.cli import options
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one
from areal.errors import UsageFault

SHELLS = ("bash", "zsh", "fish")

_INSTALL = {
    "bash": 'add to ~/.bashrc: eval "$(areal completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(areal completion zsh)"',
    "fish": "areal completion fish > ~/.config/fish/completions/areal.fish",
}


@click.command()
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@options.output()
@options.common
@pass_invocation
def completion(cli: Invocation, shell: str | None) -> None:
    """Print the completion script of SHELL (default: the shell you are in)."""
    chosen = shell or os.environ.get("SHELL", "").rpartition("/")[2]
    if chosen not in SHELLS:
        raise UsageFault(
            f"no completion for the shell {chosen or '(unknown)'!r}", hint=f"name one of {', '.join(SHELLS)}"
        )
    script = _script(chosen)
    emit_one(cli, {"shell": chosen, "script": script}, name=chosen, text=lambda: script)
    if cli.format.is_table and not cli.quiet and os.isatty(1):
        cli.say(_INSTALL[chosen])


def _script(shell: str) -> str:
    from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

    from areal.cli.main import cli

    class _Bash(BashComplete):
        @staticmethod
        def _check_version() -> None:
            """The reader's bash may be another one than this machine's first: leave the check to it."""

    makers: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": ZshComplete, "fish": FishComplete}
    return makers[shell](cli, {}, "areal", "_AREAL_COMPLETE").source()
