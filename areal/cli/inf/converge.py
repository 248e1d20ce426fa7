"""What every verb that builds manifests from its flags does with them: print them, or apply them. What is wrong with
them is said of the flags: their user has never seen a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal.cli.acting import acting, approver, timeout_s
from areal.cli.dryrun import print_manifests
from areal.cli.invocation import Invocation
from areal.cli.output.emit import show
from areal.errors import ArealError, Conflict, InvalidManifest
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.reconcilers.context import Context, Outcome
    from areal.reconcilers.requests import ApplyRequest
    from areal.state.records import StoredObject


def preview(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], dry_run: str, *, force: bool = False, anew: str = ""
) -> int:
    """``--dry-run``: the plan as text, or with -o the manifests that the flags stand for."""
    if dry_run == "client" or not cli.format.is_table:
        print_manifests(cli, manifests, "(dry run)")
        return 0
    from areal.reconcilers.apply import diff

    with acting(cli) as context, speaking_of_flags():
        plan = diff(context, _request(cli, manifests, force, None, anew))
    show(plan.to_text() or "no difference")
    return 0


def converge(
    cli: Invocation,
    context: Context,
    manifests: Sequence[Mapping[str, Any]],
    *,
    what: str,
    force: bool = False,
    timeout: float | None = None,
    anew: str = "",
) -> Outcome:
    """Apply ``manifests`` as one request. ``force`` replaces what cannot be changed and takes fields in conflict.
    ``anew``: the uid of what is replaced in any case."""
    from areal.reconcilers.apply import apply

    cli.yes = cli.yes or force or bool(anew)
    with speaking_of_flags():
        return apply(context, _request(cli, manifests, force, timeout, anew), approver(cli, what))


_FLAGS = {
    "spec.gateway.host": "--host",
    "spec.gateway.port": "--port",
    "spec.router.strategy": "--routing-strategy",
    "spec.auth.adminKeyFrom": "--admin-api-key-file",
    "spec.scheduler.type": "--scheduler",
    "spec.logLevel": "--log-level",
    "spec.service": "--service",
    "spec.backend": "--backend",
    "spec.path": "--model-path",
    "spec.tokenizerPath": "--tokenizer-path",
    "spec.engineArgs": "--engine-args",
    "spec.proxyArgs": "--proxy-args",
    "spec.replicas": "--replicas",
    "spec.servedModelName": "--served-model-name",
    "spec.probes.startup.deadlineSeconds": "--model-health-timeout",
    "spec.external.url": "--api-url",
    "spec.external.apiKeyFrom": "--provider-api-key-env",
    "spec.external.model": "--provider-model",
    "spec.external.api": "--provider-api",
    "spec.external.allowPrivate": "--allow-private",
    "spec.driver": "--driver",
    "spec.config": "--config",
    "spec.restart.policy": "--restart",
    "spec.restart.maxRestarts": "--max-restarts",
    "spec.workingDir": "the working folder",
    "spec.overrides": "",  # the message names the one that is meant
    "spec": "",
}
_FIELD = re.compile(r"\bspec(?:\.[A-Za-z]\w*|\[[^\]]*\])*")
_MISSING = re.compile(r'required field "(\w+)" is missing.*')
_PLACE = re.compile(r"<stdin>:\d+:\d+: ")


@contextmanager
def speaking_of_flags() -> Iterator[None]:
    """Errors name flags instead of fields, and no place in a manifest."""
    try:
        yield
    except ArealError as error:
        faults = getattr(error, "diagnostics", ())
        if faults:
            from areal.resources.sources import STDIN

            lines = [_of_flag(each.path, each.message) if each.pos.file == STDIN else str(each) for each in faults]
            raise InvalidManifest("\n".join(lines), hint=error.hint) from error
        error.message = _in_flags(error.message)
        if isinstance(error, Conflict) and error.hint is not None and "remove the field" in error.hint:
            error.hint = "leave the flag out to leave it to its owner, or take it with --force"
        raise


def _of_flag(path: str, message: str) -> str:
    absent = _MISSING.fullmatch(message)
    if absent is not None and (flag := _FLAGS.get(f"spec.{absent[1]}")):
        return f"{flag} is missing"
    flag, message = flag_of(path), _in_flags(message)
    return f"{flag}: {message}" if flag else message


_PHRASES = {
    "; the manifest says": "; the command line says",
    " and beside the manifest": "",
    ": neither in these manifests nor recorded": "",
}


def _in_flags(text: str) -> str:
    text = _PLACE.sub("", text)
    for phrase, own in _PHRASES.items():
        text = text.replace(phrase, own)
    return _FIELD.sub(lambda match: flag_of(match[0]) or match[0], text)


def flag_of(path: str) -> str:
    """The flag that says the field ``spec.a.b[c]``; "" where several do or the message says it, the field itself where
    none does."""
    for end in range(len(path), 0, -1):
        if (end == len(path) or path[end] in ".[") and (flag := _FLAGS.get(path[:end])) is not None:
            rest = path[end:].lstrip(".")
            takes_arguments = flag in ("--engine-args", "--proxy-args")
            return path if path[:end] == "spec" and rest else f"{flag} {rest}" if takes_arguments and rest else flag
    return path


def _request(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], force: bool, timeout: float | None, anew: str
) -> ApplyRequest:
    from areal.reconcilers.requests import ApplyRequest, Source

    return ApplyRequest(
        source=Source(manifests=tuple(manifests)),
        replace=force,
        anew=(anew,) if anew else (),
        force_conflicts=force,
        allow_downtime=force,
        timeout_s=timeout if timeout is not None else timeout_s(cli),
    )


def recorded(cli: Invocation, ref: Ref) -> StoredObject | None:
    from areal.state.objects import ObjectStore

    return ObjectStore(cli.home).get(ref)


def as_recorded(found: StoredObject) -> dict[str, Any]:
    """The manifest that the object was last applied from, to be changed by flags and applied again."""
    from areal.cli.view import manifest

    layer = next((layer for layer in found.layers if layer.manager == "apply"), None)
    return {**manifest(found), "spec": dict(layer.spec) if layer else {}}


def laid_over(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    from areal.resources.tree import merge

    merged: dict[str, Any] = merge(dict(base), dict(patch))
    return merged
