"""Flags of a service and of a model, the manifests that they stand for, and how these are previewed or applied.

Errors name flags instead of fields: the user of these verbs has never seen a manifest.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.manifest import print_manifests
from areal.cli.mutation import approver, mutation
from areal.cli.options import Invocation, Seconds, gather
from areal.cli.output import show
from areal.cli.targets import SERVICE
from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault
from areal.resources.kinds import API_VERSION, Ref, check_name

if TYPE_CHECKING:
    from areal.reconcilers.context import ApplyRequest, Context, Outcome
    from areal.state.records import StoredObject


_STRATEGIES = {
    "auto": "auto",
    "round_robin": "round_robin",
    "least_loaded": "least_loaded",
    "least_busy": "least_loaded",
    "prefix": "prefix",
}

Manifest = dict[str, Any]
MODEL_S = 1800.0  # to become ready


class ModelFlags(NamedTuple):
    """The flags of a model that our engines serve."""

    backend: str | None
    model_path: str | None
    tokenizer_path: str | None
    engine_args: tuple[str, ...]
    proxy_args: tuple[str, ...]
    served_model_name: str | None
    replicas: int | None
    model_health_timeout: float | None

    @property
    def given(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name, value in self._asdict().items() if value not in (None, ())]

    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "backend": self.backend,
            "path": self.model_path,
            "tokenizerPath": self.tokenizer_path,
            "engineArgs": arguments(self.engine_args, "--engine-args"),
            "proxyArgs": arguments(self.proxy_args, "--proxy-args"),
            "servedModelName": self.served_model_name,
            "replicas": self.replicas,
        }
        if self.model_health_timeout is not None:
            spec["probes"] = {"startup": {"deadlineSeconds": self.model_health_timeout}}
        return {key: value for key, value in spec.items() if value not in (None, {})}


model_options = gather(
    "flags",
    ModelFlags,
    (
        click.option("--backend", metavar="BACKEND", help="Engine and allocation: embedded, sglang:d2t2, vllm:d4."),
        click.option("--model-path", metavar="PATH", help="Hugging Face id or folder."),
        click.option("--tokenizer-path", metavar="PATH", help="Hugging Face id or folder  [default: the model's]."),
        click.option(
            "--engine-args", multiple=True, metavar="ARGS", help="'--max-model-len 8192 --enable-x', or JSON."
        ),
        click.option("--proxy-args", multiple=True, metavar="ARGS", help="The same, for the data proxies."),
        click.option("--served-model-name", metavar="NAME", help="What clients send as `model`  [default: --model]."),
        click.option(
            "--replicas", type=click.IntRange(min=0), metavar="N", help="Replicas; overrides d of the backend."
        ),
        click.option(
            "--model-health-timeout",
            type=Seconds(),
            metavar="TIME",
            help="A replica must be ready within  [default: 30m].",
        ),
    ),
)


def arguments(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """``--max-model-len 8192 --enable-x``, ``max-model-len=8192`` or a JSON object, as names and typed values."""
    found: dict[str, Any] = {}
    for text in texts:
        try:
            found.update(json.loads(text) if text.lstrip().startswith("{") else _words(shlex.split(text), flag))
        except json.JSONDecodeError as error:
            raise UsageFault(f"{flag}: not JSON: {error}") from None
        except ValueError as error:
            raise UsageFault(f"{flag}: {error}: {text!r}") from None
    return found


def _words(words: Sequence[str], flag: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and not name.startswith("--"):
            raise UsageFault(f"{flag}: {name!r} is no argument", hint="write '--name value', name=value, or JSON")
        name = name.removeprefix("--")
        if equals:
            found[name] = _typed(value)
        elif at < len(words) and not words[at].startswith("--"):
            found[name] = _typed(words[at])
            at += 1
        else:
            found[name] = True
    return found


def _typed(text: str) -> Any:
    """Numbers, booleans and JSON as their types; anything else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def service_manifest(
    name: str,
    *,
    host: str | None = None,
    port: int | None = None,
    admin_api_key_file: str | None = None,
    routing_strategy: str | None = None,
    scheduler: str | None = None,
    log_level: str | None = None,
) -> Manifest:
    """The given settings only: defaults are never written down."""
    spec: dict[str, Any] = {}
    gateway = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if gateway:
        spec["gateway"] = gateway
    if routing_strategy:
        spec["router"] = {"strategy": _STRATEGIES[routing_strategy]}
    if admin_api_key_file:
        path = os.path.abspath(os.path.expanduser(admin_api_key_file))  # noqa: PTH100, PTH111 - symlinks stay
        spec["auth"] = {"adminKeyFrom": {"file": path}}
    if scheduler:
        spec["scheduler"] = {"type": scheduler}
    if log_level:
        spec["logLevel"] = log_level
    return resource(SERVICE, name, spec)


def model_manifest(name: str, service: str, spec: dict[str, Any]) -> Manifest:
    return resource("Model", name, {"service": service, **spec})


def resource(kind: str, name: str, spec: dict[str, Any]) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": check_name(name)}, "spec": spec}


routing_strategies = tuple(_STRATEGIES)


# -- preview and apply


def preview(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], dry_run: str, *, force: bool = False, recreate: str = ""
) -> int:
    """``--dry-run``: the plan as text, or with -o the manifests that the flags stand for."""
    if dry_run == "client" or not cli.format.is_table:
        print_manifests(cli, manifests, "(dry run)")
        return 0
    from areal.reconcilers.apply import diff

    with mutation(cli) as context, flags_in_errors():
        plan = diff(context, _request(cli, manifests, force, None, recreate))
    show(plan.to_text() or "no difference")
    return 0


def converge(
    cli: Invocation,
    context: Context,
    manifests: Sequence[Mapping[str, Any]],
    *,
    command: str,
    force: bool = False,
    timeout: float | None = None,
    recreate: str = "",
) -> Outcome:
    """Apply ``manifests`` as one request. ``force`` replaces what cannot be changed and takes fields in conflict.
    ``recreate``: the uid of an object that is replaced in any case."""
    from areal.reconcilers.apply import apply

    cli.yes = cli.yes or force or bool(recreate)
    with flags_in_errors():
        return apply(context, _request(cli, manifests, force, timeout, recreate), approver(cli, command))


def _request(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], force: bool, timeout: float | None, recreate: str
) -> ApplyRequest:
    from areal.reconcilers.context import ApplyRequest, ManifestSource

    return ApplyRequest(
        source=ManifestSource(manifests=tuple(manifests)),
        replace=force,
        recreate=(recreate,) if recreate else (),
        force_conflicts=force,
        allow_downtime=force,
        timeout_s=timeout if timeout is not None else cli.deadline_s(),
    )


def recorded(cli: Invocation, ref: Ref) -> StoredObject | None:
    from areal.state.objects import ObjectStore

    return ObjectStore(cli.home).get(ref)


# -- errors in terms of flags

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
_PHRASES = {
    "; the manifest says": "; the command line says",
    " and beside the manifest": "",
    ": neither in these manifests nor recorded": "",
}


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Errors name flags instead of fields, and no place in a manifest."""
    try:
        yield
    except ArealError as error:
        faults = getattr(error, "diagnostics", ())
        if faults:
            from areal.resources.documents import STDIN

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
