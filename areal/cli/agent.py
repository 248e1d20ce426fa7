"""``areal agent``: agent services, sessions, rewards. Flags are final; the floor below is not built yet."""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options
from areal.cli.dryrun import DryRunCommand, dry_run_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.pending import not_implemented
from areal.cli.targets import complete_names

_service = click.option(
    "--service",
    metavar="NAME",
    default="default",
    show_default=True,
    shell_complete=complete_names("AgentService"),
    help="The agent service.",
)
_session = click.option("--session", metavar="ID", required=True, help="The session.")


def _reading(function: Any) -> Any:
    return options.remote(options.output()(options.common(function)))


def _changing(function: Any) -> Any:
    return options.yes(options.timeout("10m")(options.lock_timeout(options.output()(options.common(function)))))


@click.command(cls=DryRunCommand)
@_service
@click.option("--agent", metavar="MODULE:CLASS", required=True, help="The agent.")
@click.option("--pairs", type=click.IntRange(min=1), default=1, show_default=True, help="Worker and data-proxy pairs.")
@click.option("--host", metavar="HOST", help="Where the gateway listens  [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Its port.")
@click.option("--inf", metavar="SERVICE", shell_complete=complete_names("InferenceService"), help="Inference service.")
@click.option("--model", metavar="NAME", shell_complete=complete_names("Model"), help="Its model.")
@click.option("--session-timeout", type=Seconds(), metavar="TIME", help="An idle session ends after  [default: 30m].")
@click.option("--drain-timeout", type=Seconds(), metavar="TIME", help="Sessions may finish for  [default: 30s].")
@click.option("--health-poll-interval", type=Seconds(), metavar="TIME", help="Between health checks  [default: 5s].")
@click.option("--setup-timeout", type=Seconds(), metavar="TIME", help="A pair must be ready within  [default: 2m].")
@click.option("--env", multiple=True, metavar="K=V", help="Environment of the workers; may be repeated.")
@click.option("-d", "--detach", is_flag=True, help="Return when ready.")
@click.option("--force", is_flag=True, help="Replace a service of this name, whatever it is.")
@dry_run_option
@_changing
@pass_invocation
def run(cli: Invocation, /, **flags: object) -> int:
    """Start an agent service: a gateway, a router, and pairs of worker and data proxy."""
    return not_implemented()


@click.command()
@_service
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL.")
@click.option("--force", is_flag=True, help="No grace: SIGKILL at once.")
@click.option("--keep-state", is_flag=True, help="Stop the processes, keep the service.")
@click.option("--all", "all_", is_flag=True, help="Every agent service of this home.")
@_changing
@pass_invocation
def stop(cli: Invocation, /, **flags: object) -> int:
    """Stop an agent service; its sessions may finish within the grace."""
    return not_implemented()


@click.command()
@_service
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@_reading
@pass_invocation
def status(cli: Invocation, /, **flags: object) -> int:
    """Health of one agent service. Exit status 1 when something is down."""
    return not_implemented()


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also services that are stopped.")
@_reading
@pass_invocation
def ps(cli: Invocation, /, **flags: object) -> int:
    """List agent services."""
    return not_implemented()


@click.command()
@_service
@click.option("-c", "--component", metavar="NAME", help="gateway, router, worker or data-proxy  [default: all].")
@click.option("-r", "--replica", type=click.IntRange(min=0), metavar="N", help="One pair.")
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("--previous", is_flag=True, help="The start before the present one.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N of each.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@_reading
@pass_invocation
def logs(cli: Invocation, /, **flags: object) -> int:
    """Logs of an agent service's processes, merged in order of time."""
    return not_implemented()


_pairs = click.option("--pairs", type=click.IntRange(min=0), metavar="N", help="To this many.")
_by = click.option("--by", type=click.IntRange(min=1), metavar="N", help="By this many  [default: 1].")


@click.command()
@_service
@_pairs
@_by
@_changing
@pass_invocation
def scaleup(cli: Invocation, /, **flags: object) -> int:
    """Add worker and data-proxy pairs."""
    return not_implemented()


@click.command()
@_service
@_pairs
@_by
@_changing
@pass_invocation
def scaledown(cli: Invocation, /, **flags: object) -> int:
    """Remove pairs: each drains before it stops."""
    return not_implemented()


@click.command()
@_service
@click.option("--session", metavar="ID", help="Go on with this session  [default: the current one, else a new one].")
@click.option("-m", "--message", metavar="TEXT", help="One shot: send TEXT, print the answer.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--timeout", "answer_timeout", type=Seconds(), metavar="TIME", help="Give up on an answer after.")
@_reading
@pass_invocation
def chat(cli: Invocation, /, **flags: object) -> int:
    """Talk to the agent: one shot with -m or piped stdin, else a REPL."""
    return not_implemented()


@click.command()
@_service
@_reading
@pass_invocation
def sessions_list(cli: Invocation, /, **flags: object) -> int:
    """List sessions: id, pair, age, turns, state."""
    return not_implemented()


@click.command()
@click.argument("session")
@_service
@_reading
@pass_invocation
def sessions_show(cli: Invocation, /, **flags: object) -> int:
    """Print the history of SESSION."""
    return not_implemented()


@click.command()
@_service
@_reading
@pass_invocation
def sessions_new(cli: Invocation, /, **flags: object) -> int:
    """Open a session and make it the current one."""
    return not_implemented()


@click.command()
@click.argument("session")
@_service
@_reading
@pass_invocation
def sessions_switch(cli: Invocation, /, **flags: object) -> int:
    """Make SESSION the current one."""
    return not_implemented()


@click.command()
@click.argument("session")
@_service
@_reading
@pass_invocation
def sessions_close(cli: Invocation, /, **flags: object) -> int:
    """Close SESSION."""
    return not_implemented()


@click.command()
@click.argument("value", type=float)
@_session
@click.option("--interaction", metavar="ID", help="The interaction  [default: the last one].")
@_service
@_reading
@pass_invocation
def reward(cli: Invocation, /, **flags: object) -> int:
    """Give the reward VALUE to an interaction of a session."""
    return not_implemented()


@click.command()
@_session
@click.option("--output", "file", metavar="FILE", required=True, help="Write the trajectory here.")
@_service
@options.remote
@options.output(dest=None)
@options.common
@pass_invocation
def export(cli: Invocation, /, **flags: object) -> int:
    """Export a session's trajectory: tokens, logprobs, versions, rewards."""
    return not_implemented()
