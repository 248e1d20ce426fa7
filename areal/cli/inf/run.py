"""``areal inf run``: a service, and a model with it, in the foreground or detached."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options, view
from areal.cli.acting import acting, finish
from areal.cli.dryrun import DryRunCommand, dry_run_option
from areal.cli.inf.converge import as_recorded, converge, laid_over, preview, recorded
from areal.cli.inf.flags import (
    ModelFlags,
    model_manifest,
    model_options,
    routing_strategies,
    service_manifest,
    service_name,
    service_option,
)
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.targets import complete_names
from areal.cli.verbs.operate import together
from areal.errors import UsageFault
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from collections.abc import Callable

_LAUNCH_S = 60.0
_MODEL_S = 1800.0
_LOOK_S = 2.0


@click.command(cls=DryRunCommand)
@click.argument("name", required=False, shell_complete=complete_names("InferenceService"))
@service_option
@click.option("--host", metavar="HOST", help="Where the gateway listens  [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Its port  [default: 8080].")
@click.option("--admin-api-key-file", metavar="FILE", help="File with the admin key  [default: generated, 0600].")
@click.option("--routing-strategy", type=click.Choice(routing_strategies), help="How replicas are picked.")
@click.option("--scheduler", type=click.Choice(["local", "ray", "slurm"]), help="Where processes run.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Of gateway and router.")
@click.option("--launch-timeout", type=Seconds(), metavar="TIME", help="Gateway and router must be up within  [60s].")
@click.option("-d", "--detach", is_flag=True, help="Return when ready; otherwise follow the logs, and Ctrl-C stops.")
@click.option("--force", is_flag=True, help="Replace a service of this name, whatever it is.")
@click.option("--model", "--model-name", "model", metavar="NAME", help="Also serve this model.")
@model_options
@dry_run_option
@options.yes
@options.timeout(what="Give up waiting after this long in all (exit 7)")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def run(
    cli: Invocation,
    /,
    name: str | None,
    service: str | None,
    launch_timeout: float | None,
    detach: bool,
    force: bool,
    model: str | None,
    flags: ModelFlags,
    dry_run: str | None,
    **settings: Any,
) -> int:
    """Start the inference service NAME (the same as --service), and a model with --model.

    \b
    areal inf run -d
    areal inf run -d --model qwen --backend embedded --model-path ./qwen
    """
    if name and service and name != service:
        raise UsageFault(f"NAME says {name} and --service says {service}; give one of them")
    ref = Ref("InferenceService", service_name(cli, service or name))
    if flags.given and not model:
        raise UsageFault(f"{flags.given[0]} describes a model, and --model NAME is missing")
    manifests = [_service(cli, ref, force, settings)]
    if model:
        manifests.append(model_manifest(model, ref.name, flags.spec()))
    seconds = cli.timeout_s or _deadline(launch_timeout, flags if model else None)
    if dry_run:
        return preview(cli, manifests, dry_run, force=force)
    code = _start(cli, ref, manifests, force, seconds)
    if code:
        return code
    return _announce(cli, ref) if detach else _foreground(cli, ref)


def _service(cli: Invocation, ref: Ref, force: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """The flags given, laid over what the service was last applied from: `run` again changes only what it names."""
    wanted = service_manifest(ref.name, **settings)
    found = None if force else recorded(cli, ref)
    if found is None:
        return wanted
    base = as_recorded(found)
    return {**base, "spec": laid_over(base["spec"], wanted["spec"])}


def _deadline(launch: float | None, model: ModelFlags | None) -> float:
    seconds = launch if launch is not None else _LAUNCH_S
    if model is not None:
        seconds += model.model_health_timeout if model.model_health_timeout is not None else _MODEL_S
    return seconds


def _start(cli: Invocation, ref: Ref, manifests: list[dict[str, Any]], force: bool, seconds: float) -> int:
    """Apply; and a service that `inf stop --keep-state` has put to sleep wakes up."""
    from areal.reconcilers import operations

    with acting(cli) as context:
        outcomes = [converge(cli, context, manifests, what="inf run", force=force, timeout=seconds)]
        found = recorded(cli, ref)
        if not outcomes[0].exit_code and found is not None and found.spec.get("suspend"):
            outcomes.append(operations.resume(context, ref, timeout_s=seconds))
    return finish(cli, together(outcomes), interrupted=context.interrupted.is_set())


def _announce(cli: Invocation, ref: Ref) -> int:
    from areal.reconcilers.status import gateway_address

    address = gateway_address(str(ref), view.read_runs(cli.home).values())
    if address:
        cli.say(f"gateway: {address}; talk to it: areal inf chat --service {ref.name}")
    return 0


def _foreground(cli: Invocation, ref: Ref) -> int:
    """Follow the logs; Ctrl-C stops the processes and keeps the service, so that `areal inf run` starts it again.
    SIGTERM does the same: a unit of an init system ends what it has started."""
    from areal.cli.verbs.logs import Wanted, show_logs

    _announce(cli, ref)
    cli.say("in the foreground: Ctrl-C stops the service (with -d it keeps running)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        show_logs(cli, ref, Wanted(lines=0), follow=True, until=_stopped(cli, ref))
    except KeyboardInterrupt:
        return _put_to_sleep(cli, ref)
    cli.say(f"{ref} was stopped by another command")
    return 0


def _stopped(cli: Invocation, ref: Ref) -> Callable[[], bool]:
    """Whether somebody else has stopped or deleted the service; looks at most every two seconds."""
    next_look = time.monotonic() + _LOOK_S

    def stopped() -> bool:
        nonlocal next_look
        if time.monotonic() < next_look:
            return False
        next_look = time.monotonic() + _LOOK_S
        found = recorded(cli, ref)
        return found is None or bool(found.spec.get("suspend"))

    return stopped


def _put_to_sleep(cli: Invocation, ref: Ref) -> int:
    from areal.reconcilers import operations

    with acting(cli) as context:
        cli.say("\nstopping; Ctrl-C again leaves at once")
        outcome = operations.suspend(context, ref)
    finish(cli, outcome)
    return 130
