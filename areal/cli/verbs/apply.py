"""``areal apply`` and ``areal diff``: the same plan, executed or printed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli import options
from areal.cli.acting import acting, approver, finish, timeout_s
from areal.cli.dryrun import DryRunCommand, dry_run_option, manifest_of, print_manifests
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import dump, show, write
from areal.cli.source import SourceFlags, source_options
from areal.cli.targets import complete_targets
from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.reconcilers.plan import Plan
    from areal.reconcilers.requests import ApplyRequest


_INVALID = 3


class PolicyFlags(NamedTuple):
    """What ``apply`` may do; ``diff`` takes the same, so that it prints the very same plan."""

    prune: bool
    set_name: str | None
    allow_empty: bool
    replace: bool
    force_conflicts: bool
    allow_downtime: bool


_POLICY = (
    click.option("--prune", is_flag=True, help="Delete objects of the set that the manifests no longer hold."),
    click.option("--set-name", metavar="NAME", help="The set that --prune compares with; objects remember it."),
    click.option("--allow-empty", is_flag=True, help="Let --prune go on when the manifests hold no object."),
    click.option("--replace", is_flag=True, help="Delete and create again where a field cannot be changed."),
    click.option("--force-conflicts", is_flag=True, help="Take fields that another layer holds; say which."),
    click.option("--allow-downtime", is_flag=True, help="Stop the old before starting the new where both do not fit."),
)


def _policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def gather(*args: Any, **given: Any) -> Any:
        policy = PolicyFlags(**{name: given.pop(name) for name in PolicyFlags._fields})
        return function(*args, policy=policy, **given)

    decorated: Callable[..., Any] = gather
    for option in reversed(_POLICY):
        decorated = option(decorated)
    return decorated


@click.command(cls=DryRunCommand)
@click.argument("plan", required=False, type=click.Path(exists=True, dir_okay=False))
@source_options
@dry_run_option
@_policy_options
@click.option("--no-wait", is_flag=True, help="Return when everything is started; a process in the background goes on.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def apply(
    cli: Invocation, plan: str | None, source: SourceFlags, policy: PolicyFlags, dry_run: str | None, no_wait: bool
) -> int:
    """Converge to manifests: compare them with what is recorded and what is alive, print the difference, act.

    PLAN is a plan that `areal diff --out` has saved; it is refused (exit 5) when the world has moved since.

    \b
    areal apply -f service.yaml
    areal apply -f manifests/ -R --prune --set-name prod
    areal render -f base.yaml | areal apply -f -
    """
    _check(plan, source, policy)
    if dry_run == "client":
        rendered = source.render()
        print_manifests(cli, [manifest_of(resource) for resource in rendered.resources], "valid")
        return 0
    if dry_run:
        return _dry_run(cli, plan, source, policy)
    from areal.reconcilers.apply import apply as converge

    request = _request(cli, plan, source, policy, wait=not no_wait)
    with acting(cli) as context:
        outcome = converge(context, request, approver(cli, "this apply"))
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _dry_run(cli: Invocation, plan: str | None, source: SourceFlags, policy: PolicyFlags) -> int:
    from areal.reconcilers.apply import diff as make_plan
    from areal.reconcilers.manifests import rendered

    request = _request(cli, plan, source, policy)
    with acting(cli) as context:
        made = make_plan(context, request)
    if cli.format.is_table:
        show(_readable(made))
    elif not made.faults:
        print_manifests(cli, [manifest_of(item) for item in rendered(request.source).resources], "")
    return _refused(made)


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@source_options
@_policy_options
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Save the plan for `areal apply FILE`.")
@click.option("--drift", is_flag=True, help="No files: where reality has left the record.")
@click.option("--format", "style", type=click.Choice(["text", "github"]), default="text", help="github: Markdown.")
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def diff(
    cli: Invocation,
    targets: tuple[str, ...],
    source: SourceFlags,
    policy: PolicyFlags,
    out: str | None,
    drift: bool,
    style: str,
) -> int:
    """Print the plan that apply would run: ops with their causes, field changes old -> new, drift.

    Exit status 0: no difference; 1: differences. Where something cannot be applied, the rest is shown and the status is
    that of the worst: 3 (invalid, or nothing runs it yet), else 5 (conflict), else 10 (not enough capacity).
    """
    if drift and (not source.is_empty or out):
        raise UsageFault("--drift compares reality with the record; it takes no -f, -k or --out")
    if targets and not drift:
        raise UsageFault(
            "objects are named only with --drift", hint="areal diff -f FILE, or areal diff --drift KIND/NAME"
        )
    made = _drift(cli, targets) if drift else _diff(cli, source, policy)
    _print(cli, made, style)
    refused = _refused(made)
    if out and refused == _INVALID:
        cli.say(f"{out} was not written: a saved plan is one of valid manifests")
    elif out:
        _save(out, made)
        cli.say(f"saved; run it with `areal apply {out}`")
    return refused or (0 if made.is_empty and not made.drift else 1)


def _refused(plan: Plan) -> int:
    """Say what cannot be applied; the exit status of the worst of it, 0 where there is nothing."""
    from areal.cli.failures import error_lines, fault_lines
    from areal.errors import worst_exit
    from areal.reconcilers.outcomes import refused_error

    lines = [line for fault in plan.faults for line in fault_lines(_fault_text(fault), fault["hint"])]
    told = {fault["message"] for fault in plan.faults}
    codes = [_INVALID] if plan.faults else []
    for item in plan.objects:
        if item.refusal is not None:
            error = refused_error(item.refusal)
            codes.append(error.exit_code)
            if not any(message in error.message for message in told):
                lines += error_lines(error)
    if lines:
        sys.stdout.flush()
        click.echo("\n".join(lines), err=True)
    return worst_exit(codes)


def _fault_text(fault: Mapping[str, Any]) -> str:
    where = f"{fault['file']}:{fault['line']}:{fault['col']}"
    return f"{where}: {fault['path']}: {fault['message']}" if fault["path"] else f"{where}: {fault['message']}"


def _diff(cli: Invocation, source: SourceFlags, policy: PolicyFlags) -> Plan:
    _check(None, source, policy, verb="diff")
    from areal.reconcilers.apply import diff as make_plan

    with acting(cli) as context:
        return make_plan(context, _request(cli, None, source, policy))


def _drift(cli: Invocation, targets: tuple[str, ...]) -> Plan:
    from areal.cli.targets import parse_refs, stored
    from areal.reconcilers.apply import drift as make_plan

    refs = [str(stored(cli.home, ref).ref) for ref in parse_refs(targets)]
    with acting(cli) as context:
        return make_plan(context, refs or None)


def _check(plan: str | None, source: SourceFlags, policy: PolicyFlags, verb: str = "apply") -> None:
    if plan and not source.is_empty:
        raise UsageFault("a saved plan carries its own manifests; -f and -k do not go with it")
    if not plan:
        source.require(verb)
    if policy.prune and not policy.set_name:
        raise UsageFault("--prune needs --set-name: it deletes the objects of that set that are not in the manifests")


def _request(
    cli: Invocation, plan: str | None, source: SourceFlags, policy: PolicyFlags, *, wait: bool = True
) -> ApplyRequest:
    from areal.reconcilers.requests import ApplyRequest

    return ApplyRequest(source=source.read(), wait=wait, timeout_s=timeout_s(cli), plan_file=plan, **policy._asdict())


def _save(path: str, plan: Plan) -> None:
    import json
    from pathlib import Path

    from areal.state.files import write_atomic

    write_atomic(Path(path).absolute(), json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n")


def _print(cli: Invocation, plan: Plan, style: str) -> None:
    if cli.format.kind == "name":
        write("\n".join(item.ref for item in plan.objects if item.action != "unchanged"))
    elif cli.format.kind == "jsonl":
        from areal.cli.output.emit import compact

        write(compact(plan.to_json()))
    elif not cli.format.is_table:
        write(dump(cli.format, plan.to_json()))
    elif style == "github":
        show(_markdown(plan))
    else:
        show(_readable(plan))


def _readable(plan: Plan) -> str:
    if plan.objects or plan.ops or plan.drift:
        return f"{plan.summary}\n\n{plan.to_text()}"
    return "no object can be read" if plan.faults else "no difference"


def _markdown(plan: Plan) -> str:
    """A comment for a pull request: a table of objects, the whole plan folded below it."""
    changed = [item for item in plan.objects if item.action != "unchanged"]
    if not changed and not plan.drift and not plan.faults:
        return "**areal diff**: no difference"
    lines = [f"**areal diff**: {len(changed)} of {len(plan.objects)} objects differ", ""]
    lines += ["| object | action | why |", "| --- | --- | --- |"]
    lines += [f"| `{item.ref}` | {item.action} | {_cell(item.cause or item.decided_by)} |" for item in changed]
    lines += [f"> [!CAUTION]\n> {_fault_text(fault)}" for fault in plan.faults]
    lines += [f"> [!WARNING]\n> {sentence}" for sentence in plan.destructive]
    lines += ["", "<details><summary>plan</summary>", "", "```diff", plan.to_text(), "```", "", "</details>"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "
