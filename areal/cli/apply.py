"""``areal apply`` executes a plan, ``diff`` prints the same plan; also ``delete``, ``history`` and ``rollback``.

Shortcut commands build manifests from their flags and apply them. Their errors name flags instead of fields, because
their users do not see a manifest.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from areal.cli.failures import error_lines, fault_lines
from areal.cli.manifest import DryRunCommand, SourceFlags, dry_run_option, print_manifests, source_options
from areal.cli.objects import complete_targets, one_ref, parse_refs, select, select_all, stored, targets_argument
from areal.cli.operate import approver, mutate, mutation
from areal.cli.options import Invocation, Seconds, change_options, gather, interactive, only_with, refuse_flags
from areal.cli.output import Column, clock, dump, emit_one, emit_rows, field, show, to_yaml, write
from areal.cli.remote import local_options
from areal.errors import ArealError, Conflict, InvalidManifest, NotFound, UsageFault, with_names, worst_exit
from areal.reconcilers.home_view import manifest, revision_rows
from areal.resources.kinds import API_VERSION, Ref, check_name

if TYPE_CHECKING:
    from areal.cli.logs import LogQuery
    from areal.reconcilers.context import ApplyRequest, Context, Outcome
    from areal.reconcilers.plan import Plan
    from areal.resources.nodes import Diagnostic

_INVALID = 3
_MOST_CHANGES = 3  # of a revision in a table


class PolicyFlags(NamedTuple):
    """Flags for what ``apply`` may do; ``diff`` takes the same flags, so that it prints the same plan."""

    prune: bool
    set_name: str | None
    allow_empty: bool
    replace: bool
    force_conflicts: bool
    allow_downtime: bool


_policy_options = gather(
    "policy",
    PolicyFlags,
    (
        click.option("--prune", is_flag=True, help="Delete objects of the set that the manifests no longer hold."),
        click.option("--set-name", metavar="NAME", help="The set that --prune compares with; objects remember it."),
        click.option("--allow-empty", is_flag=True, help="Allow --prune with manifests that hold no object."),
        click.option("--replace", is_flag=True, help="Delete and create again where a field cannot be changed."),
        click.option("--force-conflicts", is_flag=True, help="Take fields that another layer holds, and list them."),
        click.option(
            "--allow-downtime", is_flag=True, help="Stop old processes before starting new ones where both do not fit."
        ),
        only_with("prune", "allow_empty"),
    ),
)


@click.command(cls=DryRunCommand)
@click.argument("plan", required=False, type=click.Path())
@source_options
@dry_run_option
@_policy_options
@click.option("--no-wait", is_flag=True, help="Return when all is started; a background process does the rest.")
@change_options(destructive=True)
def apply(
    cli: Invocation, plan: str | None, source: SourceFlags, policy: PolicyFlags, dry_run: str | None, no_wait: bool
) -> int:
    """Converge to manifests: compare them with recorded objects and live processes, print the difference, apply it.

    PLAN is a plan that `areal diff --out` has saved; it is refused (exit 5) if the state has changed since.

    \b
    areal apply -f service.yaml
    areal apply -f manifests/ -R --prune --set-name prod
    areal render -f base.yaml | areal apply -f -
    """
    _check(plan, source, policy, "apply")
    if plan and dry_run:
        raise UsageFault("--dry-run prints the plan of manifests, and PLAN is a plan", hint=f"areal apply {plan}")
    if dry_run == "client":
        print_manifests(cli, [manifest(resource) for resource in source.render().resources], "valid")
        return 0
    from areal.reconcilers import apply as reconciler

    request = _request(cli, plan, source, policy, wait=not no_wait)
    if not dry_run:
        return mutate(cli, reconciler.apply, request, approver(cli, "this apply"))
    with mutation(cli, changes=False) as context:
        made = reconciler.diff(context, request)
    if cli.format.is_table:
        show(_readable(made))
    elif not made.faults:
        from areal.resources.render import render

        print_manifests(cli, [manifest(item) for item in render(request.source).resources], "")
    return _refused(made)


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@source_options
@_policy_options
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Save the plan for `areal apply FILE`.")
@click.option("--drift", is_flag=True, help="Compare processes with recorded objects; takes no files.")
@click.option("--format", "style", type=click.Choice(["text", "github"]), default="text", help="github: Markdown.")
@click.option("--assume-capacity", is_flag=True, help="Assume free GPUs and ports: it will run on another machine.")
@change_options()
def diff(
    cli: Invocation,
    targets: tuple[str, ...],
    source: SourceFlags,
    policy: PolicyFlags,
    out: str | None,
    drift: bool,
    style: str,
    assume_capacity: bool,
) -> int:
    """Print the plan that apply would run: ops with their causes, field changes old -> new, drift.

    Exit status 0: no difference; 1: differences that apply would carry out. If an object cannot be applied, the others
    are shown, and the status is the most severe of 3 (invalid), 5 (conflict) and 10 (not enough capacity), in this
    order. Any other failure has another status, which is 70 for an unexpected one.
    """
    from areal.reconcilers import apply as reconciler
    from areal.reconcilers.prepare import drift as plan_drift

    if drift:
        refuse_flags("with --drift, which compares processes with the recorded objects", source, policy)
    if drift and out:
        raise UsageFault("--out saves the plan of manifests; it cannot be used with --drift")
    if style != "text" and cli.format_flag is not None and not cli.format.is_table:
        raise UsageFault(f"--format {style} and -o {cli.format.kind} exclude each other")
    if targets and not drift:
        raise UsageFault(
            "objects are named only with --drift", hint="areal diff -f FILE, or areal diff --drift KIND/NAME"
        )
    if drift:
        refs = [str(stored(cli.home, ref).ref) for ref in parse_refs(targets)]
        with mutation(cli, changes=False) as context:
            made = plan_drift(context, refs or None, assume_capacity=assume_capacity)
    else:
        _check(None, source, policy, "diff")
        with mutation(cli, changes=False) as context:
            request = replace(_request(cli, None, source, policy), assume_capacity=assume_capacity)
            made = reconciler.diff(context, request)
    refused = _emit_plan(cli, made, _markdown if style == "github" else _readable)
    if out and refused == _INVALID:
        cli.info(f"{out} was not written: a saved plan is one of valid manifests")
    elif out:
        from areal.state.files import write_atomic

        try:
            write_atomic(Path(out).absolute(), json.dumps(made.to_json(), indent=2, ensure_ascii=False) + "\n")
        except (ArealError, OSError) as error:
            raise UsageFault(f"the plan is not saved: {error}", hint="choose another --out FILE") from error
        cli.info(f"saved; run it with `areal apply {out}`")
    differs = not made.is_empty or made.drift or (drift and made.unknown)
    return refused or int(bool(differs))


def _emit_plan(cli: Invocation, plan: Plan, page: Callable[[Plan], str]) -> int:
    """Print a plan. Returns the most severe exit status of the objects that cannot be applied, or 0."""
    if cli.format.kind == "name":
        write("\n".join(item.ref for item in plan.objects if item.action != "unchanged"))
    elif cli.format.is_table:
        show(page(plan))
    else:
        write(dump(cli.format, plan.to_json()))
    return _refused(plan)


def _refused(plan: Plan) -> int:
    """Print the objects that cannot be applied. Returns the most severe exit status, or 0 if there are none."""
    from areal.reconcilers.plan import refused_error

    lines = [line for fault in plan.faults for line in fault_lines(str(fault), fault.hint)]
    codes = [_INVALID] if plan.faults else []
    for item in plan.objects:
        if item.refusal is not None:
            error = refused_error(item.refusal)
            codes.append(error.exit_code)
            if not item.refusal.has_faults:
                lines += error_lines(error)
    if lines:
        sys.stdout.flush()
        click.echo("\n".join(lines), err=True)
    return worst_exit(codes)


def _check(plan: str | None, source: SourceFlags, policy: PolicyFlags, verb: str) -> None:
    if plan and not plan.endswith((".yaml", ".yml")):  # a manifest without -f has an error of its own
        refuse_flags("with a saved plan, which contains its manifests and flags", source, policy)
    if not plan:
        source.require(verb)
    if policy.prune and not policy.set_name:
        raise UsageFault("--prune needs --set-name: it deletes the objects of that set that are not in the manifests")


def _request(
    cli: Invocation, plan: str | None, source: SourceFlags, policy: PolicyFlags, *, wait: bool = True
) -> ApplyRequest:
    from areal.reconcilers.context import ApplyRequest

    return ApplyRequest(source=source.read(), wait=wait, timeout_s=cli.deadline_s(), plan_file=plan, **policy._asdict())


def _readable(plan: Plan) -> str:
    if plan.objects or plan.ops or plan.drift:
        return f"{plan.summary}\n\n{plan.to_text()}"
    return "no object can be read" if plan.faults else "no difference"


def _markdown(plan: Plan) -> str:
    """Return a pull request comment: a table of objects and, folded, the whole plan."""
    changed = [item for item in plan.objects if item.action != "unchanged"]
    if not changed and not plan.drift and not plan.faults:
        return "**areal diff**: no difference"
    lines = [f"**areal diff**: {len(changed)} of {len(plan.objects)} objects differ", ""]
    lines += ["| object | action | why |", "| --- | --- | --- |"]
    for item in changed:
        why = (item.cause or item.decided_by).replace("|", "\\|").replace("\n", "<br>") or " "
        lines.append(f"| `{item.ref}` | {item.action} | {why} |")
    # A blank line, since adjacent quotes would be one, of the first kind.
    lines += [f"\n> [!CAUTION]\n> {fault}" for fault in plan.faults]
    lines += [f"\n> [!WARNING]\n> {sentence}" for sentence in plan.destructive]
    lines += ["", "<details><summary>plan</summary>", "", "```diff", plan.to_text(), "```", "", "</details>"]
    return "\n".join(lines)


Manifest = Mapping[str, object]
FLAG_FIELDS = {
    "host": "gateway.host",
    "port": "gateway.port",
    "routing_strategy": "router.strategy",
    "admin_api_key_file": "auth.adminKeyFrom.file",
    "scheduler": "scheduler.type",
    "log_level": "logLevel",
    "service": "service",
    "backend": "backend",
    "model_path": "path",
    "tokenizer_path": "tokenizerPath",
    "engine_args": "engineArgs",
    "proxy_args": "proxyArgs",
    "served_model_name": "servedModelName",
    "replicas": "replicas",
    "model_health_timeout": "probes.startup.deadlineSeconds",
    "api_url": "external.url",
    "provider_model": "external.model",
    "provider_api": "external.api",
    "allow_private": "external.allowPrivate",
    "provider_api_key_env": "external.apiKeyFrom.env",
    "agent": "agent",
    "command": "command",
    "pairs": "pairs",
    "inf": "inference.service",
    "model": "inference.model",
    "session_timeout": "session.idleTimeoutSeconds",
    "setup_timeout": "setupTimeoutSeconds",
    "drain_timeout": "drainTimeoutSeconds",
    "health_poll_interval": "healthPollSeconds",
    "env": "env",
    "driver": "driver",
    "config": "config",
    "restart": "restart.policy",
    "max_restarts": "restart.maxRestarts",
}
"""The field of the spec that each flag sets."""


def spec_of(given: Mapping[str, object]) -> dict[str, object]:
    """Return the spec that the given flags set. Other flags set nothing, so that no default is stored."""
    from areal.resources.tree import set_path

    spec: dict[str, object] = {}
    for name, path in FLAG_FIELDS.items():
        if given.get(name) not in (None, {}):
            spec = set_path(spec, tuple(path.split(".")), given[name])
    return spec


def resource(kind: str, name: str, spec: dict[str, object]) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": check_name(name)}, "spec": spec}


def preview(
    cli: Invocation, manifests: Sequence[Manifest], dry_run: str, *, force: bool = False, recreate: str = ""
) -> int:
    """Implement ``--dry-run``: print the plan, or with ``=client`` or -o the manifests built from the flags."""
    if dry_run == "client" or not cli.format.is_table:
        print_manifests(cli, manifests, "(dry run)")
        return 0
    from areal.reconcilers.apply import diff

    with mutation(cli, changes=False) as context, flags_in_errors():
        plan = diff(context, _flags_request(cli, manifests, force, recreate))
    show(plan.to_text() or "no difference")
    return 0


def converge(
    cli: Invocation,
    context: Context,
    manifests: Sequence[Manifest],
    *,
    command: str,
    force: bool = False,
    timeout: float | None = None,
    recreate: str = "",
) -> Outcome:
    """Apply ``manifests`` as one request. ``force`` replaces objects to change immutable fields, takes fields that
    other layers hold and allows downtime. ``recreate``: uid of an object that is replaced even if it is unchanged."""
    from areal.reconcilers.apply import apply

    cli.yes = cli.yes or force or bool(recreate)
    with flags_in_errors():
        return apply(context, _flags_request(cli, manifests, force, recreate, timeout), approver(cli, command))


def _flags_request(
    cli: Invocation, manifests: Sequence[Manifest], force: bool, recreate: str, timeout: float | None = None
) -> ApplyRequest:
    from areal.reconcilers.context import ApplyRequest
    from areal.resources.render import RenderRequest

    return ApplyRequest(
        source=RenderRequest(manifests=tuple(manifests)),
        replace=force,
        recreate=(recreate,) if recreate else (),
        force_conflicts=force,
        allow_downtime=force,
        timeout_s=timeout if timeout is not None else cli.deadline_s(),
    )


def foreground(cli: Invocation, ref: Ref, query: LogQuery, until: Callable[[], bool]) -> Outcome | None:
    """Follows the logs of an object until ``until()`` is true. Ctrl-C, or SIGTERM from an init system, suspends the
    object: returns the outcome of that."""
    from areal.cli.logs import show_logs
    from areal.reconcilers import operations

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        show_logs(cli, ref, query, until=until)
    except KeyboardInterrupt:
        with mutation(cli) as context:
            cli.info("\nstopping; Ctrl-C again leaves at once")
            return operations.carry_out(context, operations.suspending(context, ref))
    return None


_FLAGS = {
    **{f"spec.{path}": f"--{name.replace('_', '-')}" for name, path in FLAG_FIELDS.items()},
    "spec.auth.adminKeyFrom": "--admin-api-key-file",
    "spec.external.apiKeyFrom": "--provider-api-key-env",
    "spec.workingDir": "the working folder",
    "spec.overrides": "",  # the message names the override
    "spec": "",
}


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Make errors name flags instead of fields, and no position in a manifest."""
    from areal.reconcilers.desired import HeldFields
    from areal.resources.nodes import STDIN

    try:
        yield
    except HeldFields as error:
        hint = "leave the flag out to leave it to its owner, or take it with --force"
        raise Conflict(error.worded("the command line", _flag_or_field), hint=hint) from error
    except ArealError as error:
        if faults := getattr(error, "diagnostics", ()):
            lines = [_in_flags(each) if each.pos.file == STDIN else str(each) for each in faults]
            raise InvalidManifest("\n".join(lines), hint=error.hint) from error
        error.message = with_names(error.message, _flag_or_field)
        error.hint = with_names(error.hint, _flag_or_field) if error.hint else None
        raise


def _in_flags(fault: Diagnostic) -> str:
    if flag := _FLAGS.get(fault.absent):
        return f"{flag} is missing"
    flag = flag_of(fault.path)
    return f"{flag}: {fault.message}" if flag else fault.message


def _flag_or_field(path: str) -> str:
    return flag_of(path) or path


def flag_of(path: str) -> str:
    """Return the flag that sets the field ``spec.a.b[c]``; "" if several flags do or the message names the flag; the
    field itself if no flag sets it."""
    for end in range(len(path), 0, -1):
        if (end == len(path) or path[end] in ".[") and (flag := _FLAGS.get(path[:end])) is not None:
            rest = path[end:].lstrip(".")
            takes_arguments = flag in ("--engine-args", "--proxy-args")
            return path if path[:end] == "spec" and rest else f"{flag} {rest}" if takes_arguments and rest else flag
    return path


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME | KIND NAME]...", shell_complete=complete_targets)
@source_options
@click.option("-l", "--selector", metavar="SELECTOR", help="Of one kind, the objects with these labels.")
@click.option("--all", "all_", is_flag=True, help="All objects, or all of the kind that is named.")
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL  [default: the object's].")
@click.option("--cascade", is_flag=True, help="Also delete the objects that refer to it.")
@click.option("--wait/--no-wait", default=True, help="Return when all processes have ended  [default: wait].")
@click.option("--ignore-not-found", is_flag=True, help="Do not fail for an object that does not exist.")
@change_options(destructive=True)
def delete(
    cli: Invocation,
    targets: tuple[str, ...],
    source: SourceFlags,
    selector: str | None,
    all_: bool,
    grace: float | None,
    cascade: bool,
    wait: bool,
    ignore_not_found: bool,
) -> int:
    """Stop an object's processes, everything in their sessions, and forget the object.

    \b
    areal delete model/qwen
    areal delete -f stack.yaml --yes
    areal delete models --all
    """
    from areal.reconcilers import operations

    if all_ and (selector is not None or not source.is_empty):
        raise UsageFault("--all selects every object: it goes with neither -l nor -f")
    if targets == ("all",) and not all_:
        raise UsageFault("all objects are deleted with --all alone", hint="areal delete --all")
    if (bool(targets) or all_) == (not source.is_empty):
        raise UsageFault("name the objects to delete, or give their manifests with -f", hint="areal delete model/qwen")
    if not cli.yes and not interactive():
        raise UsageFault("delete is destructive and there is no terminal to ask on", hint="add --yes")
    if source.is_empty:
        refuse_flags("without -f or -k", source)
    if not source.is_empty:
        refs = [item.ref for item in reversed(source.require("delete").render().resources)]
    elif selector is not None:
        refs = select(cli.home, targets, selector)
    else:
        refs = select_all(cli.home, targets) if all_ else list(dict.fromkeys(parse_refs(targets)))
    if ignore_not_found:
        refs = [ref for ref in refs if cli.home.object_folder(ref, "object.json").exists()]
    if not refs:
        cli.info("nothing to delete")
        return 0
    return mutate(
        cli,
        operations.delete,
        refs,
        grace_s=grace,
        cascade=cascade,
        wait=wait,
        timeout_s=cli.deadline_s(),
        approve=approver(cli, "delete"),
    )


_COLUMNS = (
    field("REVISION", "revision", right=True),
    Column("WHEN", lambda row: clock(row["at"])),
    field("WHO", "actor"),
    field("CURRENT", "current", wide=True),
    field("SOURCE", "source"),
    Column("CHANGES", lambda row: _changes_text(row["changes"])),
)


def _changes_text(changes: Sequence[Mapping[str, object]]) -> str:
    """Return the first changes in words: ``spec.replicas: 1 -> 2``."""
    words = [f"{each['path']}: {_value(each['old'])} -> {_value(each['new'])}" for each in changes[:_MOST_CHANGES]]
    more = len(changes) - _MOST_CHANGES
    return "; ".join([*words, *([f"{more} more"] if more > 0 else [])])


def _value(value: object) -> str:
    return "(not set)" if value is None else json.dumps(value, ensure_ascii=False)


@click.command()
@targets_argument
@click.option("--revision", type=click.IntRange(min=1), metavar="N", help="Print the spec of this revision.")
@local_options
def history(cli: Invocation, targets: tuple[str, ...], revision: int | None) -> None:
    """List the accepted specs of an object, with actor, time, file, and what changed. The last 20 are kept.

    A restart changes no spec: `areal events` lists it.
    """
    ref = one_ref(targets)
    rows = revision_rows(cli.home, ref)
    if revision is None:
        emit_rows(cli, rows, _COLUMNS, name=lambda row: f"{ref}@{row['revision']}")
        return
    row = next((row for row in rows if row["revision"] == revision), None)
    if row is None:
        kept = ", ".join(str(row["revision"]) for row in rows)
        raise NotFound(f"{ref} has no revision {revision}", hint=f"revisions kept: {kept}")
    emit_one(cli, row, name=f"{ref}@{revision}", text=lambda: to_yaml([row["spec"]]))


@click.command()
@targets_argument
@click.option(
    "--to", type=click.IntRange(min=1), metavar="N", help="Revision  [default: the newest with another manifest]."
)
@click.option("--dry-run", is_flag=True, help="Print the plan, do nothing.")
@change_options(destructive=True)
def rollback(cli: Invocation, targets: tuple[str, ...], to: int | None, dry_run: bool) -> int:
    """Apply the manifest of an earlier revision again; a new revision records it.

    What other commands have set, such as `areal scale`, stays.
    """
    from areal.reconcilers import operations

    ref = one_ref(targets)
    if dry_run:
        with mutation(cli) as context:
            made = operations.plan_change(context, operations.rolling_back(context, ref, to))
        return _emit_plan(cli, made, _readable)
    seconds, approve = cli.deadline_s(), approver(cli, "rollback")

    def roll_back(context: Context) -> Outcome:
        return operations.carry_out(context, operations.rolling_back(context, ref, to), seconds, approve)

    return mutate(cli, roll_back)
