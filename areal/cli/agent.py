"""``areal agent``: agent services, sessions, rewards. The flags are final; every verb fails with exit status 1.

A script must not take an unfinished verb for success, so it raises.
"""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options
from areal.cli.logs import log_options
from areal.cli.manifest import DryRunCommand, dry_run_option
from areal.cli.objects import complete_names
from areal.cli.options import Decorator, Seconds, change_options, pass_invocation, read_options, stack, watch_options
from areal.errors import ArealError
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, MODEL


def _verb(text: str, *decorators: Decorator[Any], cls: type[click.Command] = click.Command) -> click.Command:
    """A verb whose flags are read, and whose body is one line on stderr."""

    def fail(*args: object, **flags: object) -> None:
        raise ArealError(f"`{click.get_current_context().command_path}` is not implemented yet")

    fail.__doc__ = text
    return click.command(cls=cls)(stack(*decorators)(fail))


_service = click.option(
    "--service",
    metavar="NAME",
    default="default",
    show_default=True,
    shell_complete=complete_names(AGENT_SERVICE),
    help="The agent service.",
)
_session = click.option("--session", metavar="ID", required=True, help="The session.")
_session_argument = click.argument("session")
_reading = stack(_service, read_options())
_changing = change_options(destructive=True)

run = _verb(
    "Start an agent service: a gateway, a router, and pairs of worker and data proxy.",
    _service,
    click.option("--agent", metavar="MODULE:CLASS", required=True, help="The agent."),
    click.option(
        "--pairs", type=click.IntRange(min=1), default=1, show_default=True, help="Worker and data-proxy pairs."
    ),
    click.option("--host", metavar="HOST", help="Where the gateway listens  [default: 127.0.0.1]."),
    click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Its port."),
    click.option(
        "--inf", metavar="SERVICE", shell_complete=complete_names(INFERENCE_SERVICE), help="Inference service."
    ),
    click.option("--model", metavar="NAME", shell_complete=complete_names(MODEL), help="Its model."),
    click.option(
        "--session-timeout", type=Seconds(), metavar="TIME", help="An idle session ends after  [default: 30m]."
    ),
    click.option("--drain-timeout", type=Seconds(), metavar="TIME", help="Sessions may finish for  [default: 30s]."),
    click.option(
        "--health-poll-interval", type=Seconds(), metavar="TIME", help="Between health checks  [default: 5s]."
    ),
    click.option("--setup-timeout", type=Seconds(), metavar="TIME", help="A pair must be ready within  [default: 2m]."),
    click.option("--env", multiple=True, metavar="K=V", help="Environment of the workers; may be repeated."),
    click.option("-d", "--detach", is_flag=True, help="Return when ready."),
    click.option("--force", is_flag=True, help="Replace a service of this name, whatever it is."),
    dry_run_option,
    _changing,
    cls=DryRunCommand,
)
stop = _verb(
    "Stop an agent service; its sessions may finish within the grace.",
    _service,
    options.stop_options,
    click.option("--keep-state", is_flag=True, help="Stop the processes, keep the service."),
    click.option("--all", "all_", is_flag=True, help="Every agent service of this home."),
    _changing,
)
status = _verb("Health of one agent service. Exit status 1 when something is down.", watch_options(), _reading)
ps = _verb(
    "List agent services.",
    click.option("-a", "--all", "all_", is_flag=True, help="Also services that are stopped."),
    read_options(),
)
logs = _verb(
    "Logs of an agent service's processes, merged in order of time.",
    _service,
    log_options([AGENT_SERVICE], replica="One pair."),
    read_options(),
)
_scale_options = stack(
    _service,
    click.option("--pairs", type=click.IntRange(min=0), metavar="N", help="To this many."),
    click.option("--by", type=click.IntRange(min=1), metavar="N", help="By this many  [default: 1]."),
    _changing,
)
scaleup = _verb("Add worker and data-proxy pairs.", _scale_options)
scaledown = _verb("Remove pairs: each drains before it stops.", _scale_options)
chat = _verb(
    "Talk to the agent: one shot with -m or piped stdin, else a REPL.",
    _service,
    click.option(
        "--session", metavar="ID", help="Go on with this session  [default: the current one, else a new one]."
    ),
    click.option("-m", "--message", metavar="TEXT", help="One shot: send TEXT, print the answer."),
    click.option("--no-stream", is_flag=True, help="Print the answer when it is whole."),
    click.option("--timeout", "answer_timeout", type=Seconds(), metavar="TIME", help="Give up on an answer after."),
    read_options(),
)
sessions_list = _verb("List sessions: id, pair, age, turns, state.", _reading)
sessions_show = _verb("Print the history of SESSION.", _session_argument, _reading)
sessions_new = _verb("Open a session and make it the current one.", _reading)
sessions_switch = _verb("Make SESSION the current one.", _session_argument, _reading)
sessions_close = _verb("Close SESSION.", _session_argument, _reading)
reward = _verb(
    "Give the reward VALUE to an interaction of a session.",
    click.argument("value", type=float),
    _session,
    click.option("--interaction", metavar="ID", help="The interaction  [default: the last one]."),
    _reading,
)
export = _verb(
    "Export a session's trajectory: tokens, logprobs, versions, rewards.",
    _session,
    click.option("--output", "file", metavar="FILE", required=True, help="Write the trajectory here."),
    _service,
    stack(options.remote, options.output(dest=None), options.common, pass_invocation),
)
