"""Operations on recorded objects: ``areal scale|restart|suspend|resume|wait|reconcile|adopt|doctor``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.mutation import finish, mutate, mutation
from areal.cli.options import Invocation, Seconds, change_options, stack, timeout
from areal.cli.output import emit_rows, report, show
from areal.cli.remote import checked_url, gateway
from areal.cli.table import field
from areal.cli.targets import complete_names, complete_targets, one_ref, parse_refs, select, targets_argument
from areal.errors import ArealError, UsageFault

if TYPE_CHECKING:
    from areal.reconcilers.context import Context, Outcome
    from areal.reconcilers.doctor import Finding
    from areal.resources.kinds import Ref


@click.command()
@targets_argument
@click.option("--replicas", type=click.IntRange(min=0), required=True, metavar="N", help="How many there shall be.")
@click.option("--model", metavar="NAME", shell_complete=complete_names("Model"), help="Which model of a service.")
@click.option("--current", type=click.IntRange(min=0), metavar="N", help="Only when N is the present number (exit 5).")
@click.option("--force-conflicts", is_flag=True, help="Take the field when another layer holds it.")
@change_options()
def scale(
    cli: Invocation,
    targets: tuple[str, ...],
    replicas: int,
    model: str | None,
    current: int | None,
    force_conflicts: bool,
) -> int:
    """Set the number of replicas. A later apply of a manifest that says another number is a conflict."""
    return scale_object(cli, one_ref(targets), replicas, model=model, current=current, force=force_conflicts)


def scale_object(cli: Invocation, ref: Ref, replicas: int, *, within_s: float = 600.0, **how: Any) -> int:
    from areal.reconcilers import operations

    return mutate(
        cli, lambda context: operations.scale(context, ref, replicas, timeout_s=cli.deadline_s(within_s), **how)
    )


@click.command()
@targets_argument
@change_options()
def restart(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Restart an object's processes: the new beside the old, then the old drains, where there is room."""
    from areal.reconcilers import operations

    return _each(cli, targets, operations.restart)


@click.command()
@targets_argument
@change_options()
def suspend(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Stop an object's processes and keep the object; `areal resume` starts them again."""
    from areal.reconcilers import operations

    return _each(cli, targets, operations.suspend)


@click.command()
@targets_argument
@change_options()
def resume(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Start a suspended object again."""
    from areal.reconcilers import operations

    return _each(cli, targets, operations.resume)


def _each(cli: Invocation, targets: tuple[str, ...], operation: Callable[..., Outcome]) -> int:
    """One after the other; a failure on one object is reported beside the outcomes of the others."""
    from areal.reconcilers.context import ObjectOutcome, Outcome

    refs = parse_refs(targets)

    def run(context: Context) -> Outcome:
        outcomes = []
        for ref in refs:
            try:
                outcomes.append(operation(context, ref, timeout_s=cli.deadline_s()))
            except ArealError as error:
                if len(refs) == 1:
                    raise
                failed = ObjectOutcome(str(ref), "failed", error.message, error.exit_code, error)
                outcomes.append(Outcome((failed,), exit_code=error.exit_code))
            if context.interrupted.is_set():
                break
        return together(outcomes)

    return mutate(cli, run)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Several outcomes as one, with the status that the exit table gives them; of an object, the last change."""
    from areal.errors import worst_exit
    from areal.reconcilers.context import Outcome

    objects = {item.ref: item for outcome in outcomes for item in outcome.objects if item.action == "unchanged"}
    objects.update({item.ref: item for outcome in outcomes for item in outcome.objects if item.action != "unchanged"})
    return Outcome(
        objects=tuple(objects.values()),
        notes=tuple(note for outcome in outcomes for note in outcome.notes),
        exit_code=worst_exit([outcome.exit_code for outcome in outcomes]),
        addresses={ref: url for outcome in outcomes for ref, url in outcome.addresses.items()},
    )


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Stay in the foreground and go on until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="10s", show_default=True, metavar="TIME", help="Between rounds.")
@change_options(destructive=True)
def reconcile(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float) -> int:
    """Compare recorded objects with live processes, and heal the difference; no manifests are read."""
    from areal.reconcilers.operations import reconcile_once

    refs = tuple(parse_refs(targets)) or None
    if not watch:
        return mutate(cli, lambda context: reconcile_once(context, refs))
    with mutation(cli) as context:
        cli.say(f"watching every {interval:g} s; Ctrl-C ends it")
        while not context.interrupted.is_set():
            try:
                done = reconcile_once(context, refs)
            except ArealError as error:
                report(error, cli)
            else:
                if done.notes or any(item.action != "unchanged" for item in done.objects):
                    finish(cli, done)
            context.interrupted.wait(interval)
    return 130


@click.command()
@click.argument("target", required=False, metavar="[KIND/NAME]", shell_complete=complete_targets)
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="A process of this machine.")
@click.option("--url", metavar="URL", help="An OpenAI-compatible server.")
@click.option("--as", "as_", metavar="KIND/NAME", shell_complete=complete_targets, help="What it becomes.")
@change_options()
def adopt(cli: Invocation, target: str | None, pid: int | None, url: str | None, as_: str | None) -> int:
    """Take a running process or URL under management, without restarting it.

    \b
    areal adopt --url http://10.0.0.7:8000 --as model/qwen
    areal adopt --pid 4711 --as model/qwen
    """
    from areal.reconcilers import operations

    name = as_ or target
    if name is None or (as_ and target and as_ != target):
        raise UsageFault("say what it becomes: --as KIND/NAME", hint="areal adopt --url URL --as model/NAME")
    if (pid is None) == (url is None):
        raise UsageFault("give one of --pid and --url")
    (ref,) = parse_refs([name])
    address = checked_url(url) if url else None
    return mutate(cli, lambda context: operations.adopt(context, ref, pid=pid, url=address))


# -- wait

_WORDS = ("ready", "deleted", "completed")
_FORMS = "ready, deleted, completed, condition=TYPE[=STATUS] or jsonpath=EXPR=VALUE"
_CONDITION = r"condition=[A-Za-z]+(=[A-Za-z]+)?"
_PART = r"(?:[^,\[\]'\"{}]|\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\")+"


@click.command()
@targets_argument
@click.option(
    "--for",
    "conditions",
    multiple=True,
    required=True,
    metavar="CONDITION",
    help=f"{_FORMS}; comma: or, repeated: and.",
)
@click.option("-l", "--selector", metavar="SELECTOR", help="Of one kind, the objects with these labels.")
@timeout("10m", "One deadline for everything (exit 7)")
@options.read_options()
def wait(cli: Invocation, targets: tuple[str, ...], conditions: tuple[str, ...], selector: str | None) -> int:
    """Wait until objects meet conditions. Fails at once (exit 8) when they can no longer be met.

    \b
    areal wait model/qwen --for ready --timeout 20m
    areal wait job/gsm8k --for completed,condition=Stalled
    """
    wanted = tuple(parse_alternatives(text) for text in conditions)
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import wait_remote

        return wait_remote(cli, chosen, parse_refs(targets), wanted, cli.deadline_s())
    refs = select(cli.home, targets, selector) if selector is not None else parse_refs(targets)
    return wait_for(cli, refs, wanted)


def wait_for(
    cli: Invocation, refs: Sequence[Ref], wanted: tuple[tuple[str, ...], ...], *, within_s: float = 600.0, **how: Any
) -> int:
    from areal.reconcilers import status

    return mutate(cli, lambda context: status.wait(context, refs, wanted, cli.deadline_s(within_s), **how))


def parse_alternatives(text: str) -> tuple[str, ...]:
    """``a,b`` as (a, b); a comma inside quotes or brackets separates nothing."""
    parts = re.findall(_PART, text)
    if not parts or ",".join(parts) != text:
        raise UsageFault(f"cannot read --for {text!r}", hint=f"write {_FORMS}")
    return tuple(_condition(part.strip()) for part in parts)


def _condition(text: str) -> str:
    if text.lower() in _WORDS:
        return text.lower()
    if re.fullmatch(_CONDITION, text):
        return text
    if text.startswith("jsonpath="):
        from areal.resources.jsonpath import compile_template

        expression, equals, _ = text.removeprefix("jsonpath=").rpartition("=")
        if not equals:
            raise UsageFault(f"--for {text} names no value", hint="write jsonpath={.status.phase}=Running")
        compile_template(expression)
        return text
    from areal.errors import did_you_mean

    raise UsageFault(f'no condition "{text}"{did_you_mean(text, _WORDS)}', hint=f"write {_FORMS}")


# -- doctor

_FINDINGS = (
    field("SEVERITY", "severity", state=True),
    field("FIXED", "fixed"),
    field("WHAT", "what"),
    field("WHY", "why", wide=True),
    field("FIX", "fixCommand"),
)


@click.command()
@click.option("--fix", is_flag=True, help="Make the repairs that lose nothing.")
@click.option("--security", is_flag=True, help="Also: exposed ports, file modes, keys in the environment.")
@stack(options.yes, options.lock_timeout, options.output(), options.common, options.pass_invocation)
def doctor(cli: Invocation, fix: bool, security: bool) -> int:
    """Find strays, open journals, stale leases, GPU squatters, a home on NFS, damaged files.

    Exit status 1 when something is left to repair.
    """
    from areal.reconcilers.doctor import doctor as examine

    with mutation(cli) as context:
        findings = examine(context, fix, security)
    if cli.format.kind == "table":
        show("\n".join(map(_finding_text, findings)))
        if not findings:
            cli.say("nothing found")
    else:
        rows = [
            {
                "severity": finding.severity,
                "what": finding.what,
                "why": finding.why,
                "fixCommand": finding.fix_command,
                "fixed": finding.fixed,
            }
            for finding in findings
        ]
        emit_rows(cli, rows, _FINDINGS, name=lambda row: str(row["what"]), empty="nothing found")
    return 1 if any(not item.fixed and item.severity != "info" for item in findings) else 0


def _finding_text(finding: Finding) -> str:
    lines = [f"{'fixed' if finding.fixed else finding.severity}: {finding.what}"]
    if finding.why:
        lines.append(f"  {finding.why}")
    if finding.fix_command and not finding.fixed:
        lines.append(f"  hint: {finding.fix_command}")
    return "\n".join(lines)
